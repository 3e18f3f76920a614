"""What a job hands in: its state, named in one way for every call; and what every job writes again."""
