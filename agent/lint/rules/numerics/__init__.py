"""Arithmetic that 16 bits cannot carry."""
