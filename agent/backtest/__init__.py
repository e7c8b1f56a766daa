"""Judges past runs from their logs, by the conditions, the account and the detector of a live run.

A log is read (`readers`) into points (`log`), which become merged steps; `judge` folds them into
the account of the node agent and lets its detector judge them. `past_runs` judges many logs at
once, `report` shows what came of it, `tuning` proposes thresholds from healthy runs.
"""
