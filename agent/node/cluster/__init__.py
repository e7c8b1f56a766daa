"""One attempt over all nodes: reports of this node, and merging at the root."""
