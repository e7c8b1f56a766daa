"""Metrics of the outputs of modules."""
