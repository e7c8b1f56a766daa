"""Conditions of the outputs of modules."""
