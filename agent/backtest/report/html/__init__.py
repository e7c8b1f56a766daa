"""A backtest as one HTML file with curves and marks, which opens offline."""
