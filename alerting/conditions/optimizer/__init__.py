"""Conditions of the optimizer: its state, and what becomes of its updates."""
