"""The order of calls that a GradScaler needs."""
