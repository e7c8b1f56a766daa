"""Whether the guard rescues trainings that fail without it, and leaves healthy ones alone."""
