"""Metrics of the routers of mixtures of experts."""
