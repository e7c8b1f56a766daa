"""Logs that were printed for people: lines with numbers among other lines."""
