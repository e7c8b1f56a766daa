"""Metrics of the optimizer: weights, what a step does to them, and its second moments."""
