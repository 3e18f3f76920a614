"""Coverage-guided fuzzing of everything that reads a peer's bytes. See ``python -m fuzz --help``."""
