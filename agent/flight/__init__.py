"""The flight record: what the last steps of a run were, how they are kept, and what they tell."""
