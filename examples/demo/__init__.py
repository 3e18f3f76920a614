"""A training job whose workers are killed and then healed by their peers: ``python -m examples.demo``."""
