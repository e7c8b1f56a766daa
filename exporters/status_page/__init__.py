"""The status page at `/` of a node agent, and the JSON behind it."""
