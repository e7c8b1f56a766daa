"""State of the loss, the loss scale and the learning rate, from step to step."""
