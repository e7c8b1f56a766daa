"""Conditions of single ranks, and of replicas that differ."""
