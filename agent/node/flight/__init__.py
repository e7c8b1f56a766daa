"""Flight records of a node: when they are due, writing, requests and replay."""
