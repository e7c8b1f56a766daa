"""Metrics of what FP8 makes of the operands of linear layers."""
