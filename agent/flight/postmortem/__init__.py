"""The analysis of a flight record: what went wrong first, why, and what to do."""
