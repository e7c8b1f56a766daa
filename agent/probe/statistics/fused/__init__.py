"""Statistics of gradients on a GPU by kernels of our own, which read each element once.

Step by step: `runs` describes where the elements of a tensor lie, `chunks` cuts that into equal
amounts of work, `kernels` measures and folds them, `launches` starts that, `build` gets the kernels
compiled, and `statistics` measures one set of gradients after another. Shapes: as in the package
above.
"""
