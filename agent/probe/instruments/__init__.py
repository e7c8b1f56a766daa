"""What is measured on request, an instrument each: when, by which hooks, and as which columns."""
