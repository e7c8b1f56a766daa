"""Metrics of mp_agent itself: what it costs, loses, pushes and writes."""
