"""Measures the tensors that the training script watches, on sampled steps.

`statistics` computes a row of one tensor, `running_sum` what a sum in its dtype would lose,
`slices` how the ranges of its slices differ; `watched` keeps the rows of a step, by name.
"""
