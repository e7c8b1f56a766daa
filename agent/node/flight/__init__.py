"""Flight records on a node: when they are due, and how they are written."""
