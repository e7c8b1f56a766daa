"""The flight record: the last steps of a run, their file format, and their analysis."""
