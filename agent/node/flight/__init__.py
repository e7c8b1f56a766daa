"""Flight records on a node: when they are due, how they are written, and the commands for them."""
