"""Conditions of mp_agent itself: what it does not cover or loses."""
