"""The shared-memory file through which a rank tells the node agent what it sees."""
