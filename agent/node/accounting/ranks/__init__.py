"""State of the ranks' pace, from step to step."""
