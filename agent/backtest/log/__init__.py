"""A training log as points, and the points as merged steps with their times."""
