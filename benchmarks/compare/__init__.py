"""Transfuse beside what one would use instead: cases, peers, the machine's limits, and what comes out of them."""
