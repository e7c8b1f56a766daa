"""The first line of a critical alert, and which conditions follow from which."""
