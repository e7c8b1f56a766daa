"""Trains copies of a model in FP32 and by a plan, by turns, and measures both."""
