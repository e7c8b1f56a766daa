"""The result of a comparison of precisions, and how it is shown."""
