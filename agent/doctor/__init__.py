"""`mp-agent doctor`: why no series appear, looked into from the machine."""
