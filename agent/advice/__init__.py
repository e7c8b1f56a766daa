"""Recommends a precision for a model on this hardware, with reasons (torch).

`api` asks `measure` for what torch says of the machine and what a few FP32 steps show of the
gradients, and `choose` for each part of the plan; `report` shows the result. `plan` and
`environment` are plain data.
"""
