"""What turns a Snapshot into something that another system reads."""
