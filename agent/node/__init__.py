"""The node agent: one process per node and run, without torch, that reads, merges and exports."""
