"""One step as seen so far, its boundaries, and when its layers are measured."""
