"""Engines that keep gradients and masters of their own: DeepSpeed and Megatron-Core."""
