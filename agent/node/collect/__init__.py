"""The rings of this node, read step by step: which ranks, how far, and whether they live."""
