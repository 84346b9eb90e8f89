"""Studies: one module each, a question with the cases that answer it. `run` runs one by name."""
