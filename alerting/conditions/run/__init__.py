"""Conditions of the run as a whole: its progress, failures and restarts."""
