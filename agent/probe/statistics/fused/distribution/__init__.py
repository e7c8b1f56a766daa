"""How gradients are distributed, by kernels of our own: `DISTRIBUTION` on sampled steps.

`boundaries` says what is counted of a chunk and which columns that makes, `kernels` counts and
folds, and `launches` starts it.
"""
