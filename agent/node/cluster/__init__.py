"""One attempt over all nodes: what this node reports, and what the root merges."""
