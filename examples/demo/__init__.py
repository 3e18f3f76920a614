"""A training job whose workers are killed, and healed by their peers before your eyes: ``python -m examples.demo``."""
