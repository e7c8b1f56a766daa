"""Statistics of gradients on a GPU by kernels of our own, which read each element once.

Step by step: `chunks` finds where the elements of a tensor lie and cuts that into equal amounts of
work, `kernels` measures and folds them, `launches` starts that, `build` gets the kernels
compiled, and `statistics` measures one set of gradients after another. `distribution_kernels` does
the same for `DISTRIBUTION`, on sampled steps. Shapes: as in the package above.
"""
