"""A drill of faults: what a run keeps when its processes, its disk or its files are harmed. `make drill` runs it."""
