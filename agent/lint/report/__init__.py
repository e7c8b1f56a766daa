"""Writes the findings for people and for programs."""
