"""Finds modules, parameter names and new optimizers among the live objects."""
