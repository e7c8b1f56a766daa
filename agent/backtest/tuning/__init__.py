"""Proposes thresholds from runs that the user calls healthy, and writes them as settings."""
