"""The keeper: a process that keeps the workers' states in memory while all workers restart."""
