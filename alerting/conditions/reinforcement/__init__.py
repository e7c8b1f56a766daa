"""Conditions of reinforcement learning."""
