"""Metrics of a run and its ranks: identity, progress, waiting, and conditions found."""
