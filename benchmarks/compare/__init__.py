"""Compare transfuse with the alternatives: cases, peers, the machine's limits, and the results."""
