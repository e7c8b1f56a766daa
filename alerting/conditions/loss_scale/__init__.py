"""Conditions of the loss scale and of the steps skipped because of it."""
