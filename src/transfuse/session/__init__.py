"""One transfer: both ends of it, and what the conversations of a receive share."""
