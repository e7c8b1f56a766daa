"""Trainings with silent errors, and which conditions find them."""
