"""The account of a run: what its closed steps, folded in one by one, add up to."""
