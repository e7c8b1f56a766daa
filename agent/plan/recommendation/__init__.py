"""Recommends a precision for a model on this hardware, with reasons (torch).

`api` asks `products` for what torch says of the machine and of the model's products, `steps` for
what a few FP32 steps show of the gradients, and `choose` for each part of the plan; `trials` tries
a precision. `model` holds the result, `report` shows it.
"""
