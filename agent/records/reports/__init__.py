"""The report of a node agent to the root agent: its rows, their encoding and its checks."""
