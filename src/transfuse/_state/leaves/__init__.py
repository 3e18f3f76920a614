"""Kinds of leaves: one codec for each kind that is not a plain tensor."""
