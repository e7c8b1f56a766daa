"""A model's copy that trains by a plan; `evaluate` measures it with the same code."""
