"""Metrics of attention logits and output logits."""
