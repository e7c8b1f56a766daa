"""An evaluation as one HTML page that loads nothing."""
