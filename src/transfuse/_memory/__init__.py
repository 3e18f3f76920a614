"""This process's bytes: allocate, pack, hash and land them."""
