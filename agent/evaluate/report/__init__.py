"""Shows an evaluation: in the terminal, as JSON, as an HTML page."""
