"""The algebra: rows of ranks become rows of a node, rows of nodes become rows of the run."""
