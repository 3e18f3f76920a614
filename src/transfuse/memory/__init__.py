"""This process's bytes: allocated, packed, hashed, landed."""
