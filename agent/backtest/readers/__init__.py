"""Reads training logs: a module per format, and `find`, which tells the formats apart."""
