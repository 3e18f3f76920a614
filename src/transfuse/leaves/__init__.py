"""Leaves: what a state tree holds at its ends, and how each kind of it is carried."""
