"""An analysis for its readers: in the terminal, as an HTML page, and as JSON."""
