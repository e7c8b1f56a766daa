"""Who this process is: run, attempt, rank and node, from the launcher's environment."""
