"""State of gradient norms and of layers, from step to step."""
