"""The shared-memory file through which a rank hands its records to the node agent."""
