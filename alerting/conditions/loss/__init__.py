"""Conditions of the loss and the learning rate."""
