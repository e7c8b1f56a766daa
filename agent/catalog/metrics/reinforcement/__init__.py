"""Metrics of reinforcement learning: how trainer and sampler differ."""
