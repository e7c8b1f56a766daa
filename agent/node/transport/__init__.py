"""HTTP between the node agents of a run: rows go to the root agent."""
