"""A backtest for people and programs: in the terminal, as JSON, as one HTML page."""
