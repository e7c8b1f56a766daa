"""Statistics of gradients in host memory, in passes that stay in the processor's cache."""
