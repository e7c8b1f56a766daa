"""Each part of a plan, from what was measured; without torch."""
