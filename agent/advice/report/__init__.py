"""Shows a recommendation: in the terminal, as JSON, as code to paste."""
