"""Measures a precision plan against FP32: speed, memory, loss (torch).

`execution` trains copies of a model by turns, `targets` holds what a plan should reach, `report`
shows the result.
"""
