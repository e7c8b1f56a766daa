"""Metrics of the training itself: loss, loss scale, and whether steps train the model."""
