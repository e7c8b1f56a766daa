"""Example series: what a condition fires on, what it must not, and healthy runs around them."""
