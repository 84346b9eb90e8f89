"""Results: the reading, the result table, the run directory that survives a kill, the environment it came from."""
