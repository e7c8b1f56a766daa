"""Mistakes that cost time."""
