"""An analysis as one HTML file with plots, which opens offline."""
