"""Statistics of gradients on a GPU by kernels of our own, which read each element once.

Step by step: `runs` describes where the elements of a tensor lie, `chunks` cuts that into equal
amounts of work, `measure` and `fold` are the kernels, `launches` starts them, `build` gets them
compiled, and `statistics` measures one set of gradients after another. Shapes: as in the package
above.
"""
