"""The files of a flight record: their format, their limits, and what they hold as evidence."""
