"""Megatron-Core: what its optimizers keep of a model's gradients, read just before they step.

Its optimizers unscale, clip and skip by themselves, and step copies or flat slices of the model's
parameters. `gradients` knows where each kind keeps its part of which parameter, `placement` over
which ranks a part lies, `names` what the model calls it; `plan` makes layers and shares of that.
`reader` knows scale, clipping and outcome of a step, `losses` what a schedule makes of losses.
Megatron is neither imported nor called. What is not known to be right is named unsupported.
"""
