"""What a condition looks at: signals and predicates over metrics, as plain data and as PromQL."""
