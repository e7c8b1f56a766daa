"""The conditions catalog: what goes wrong in a run, when, and what to do; and its renderings."""
