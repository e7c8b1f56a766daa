"""Reads training logs: a module per format, and `find`, which recognises the format."""
