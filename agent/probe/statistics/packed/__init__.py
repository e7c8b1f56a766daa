"""Statistics of gradients on an accelerator, in a packed scratch, with stock operations."""
