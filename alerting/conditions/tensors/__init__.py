"""Conditions of the tensors that the training script watches."""
