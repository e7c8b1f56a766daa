"""Measures a precision plan against FP32: speed, memory, loss (torch).

`api` trains copies of a model by turns, `model` holds what a plan should reach and what it did,
`report` shows it.
"""
