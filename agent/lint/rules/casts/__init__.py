"""Explicit casts to 16 bits."""
