"""Counters and derived state of a run, updated with each closed step."""
