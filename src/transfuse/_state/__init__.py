"""A state as plain data: its tree, its leaves, their tensors and storages."""
