"""How gradients are distributed, by kernels of our own: `DISTRIBUTION` on sampled steps.

`boundaries` says what is counted of a chunk and which columns that makes, `count` and `fold` are
the kernels, `launches` starts them, and `rows` measures a set of layers with them.
"""
