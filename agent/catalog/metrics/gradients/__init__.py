"""Metrics of gradients: of a run and of its layers, and whether replicas agree."""
