"""What torch says of the machine, and what FP32 steps of a model's copy show."""
