"""The comparison of two runs as one HTML page that loads nothing."""
