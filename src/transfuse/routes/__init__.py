"""Routes: how bytes move between two ranks."""
