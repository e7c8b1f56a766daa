"""Conditions of gradients and of the updates made with them."""
