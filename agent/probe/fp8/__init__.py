"""Measures what FP8 makes of the operands of linear layers, on sampled steps.

`layers` finds the linear layers of a model and those that Transformer Engine scales, `operands`
counts what a cast flushes to zero, `delayed_scaling` reads scales and amax, `sampling` hooks the
layers for one forward pass and their outputs for the backward pass after it, and `step` adds the
rows to the step under way.
"""
