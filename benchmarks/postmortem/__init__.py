"""Whether a post-mortem names the right cause first, on small trainings with planted causes."""
