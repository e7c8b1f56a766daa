"""What is recommended for models of several kinds, and what it brings when it is measured."""
