"""Serve and fetch, for processes outside the group."""
