"""Serve a state to processes outside the group, and fetch one from there."""
