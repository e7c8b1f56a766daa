"""What a set of gradients amounts to: norm, largest magnitude, zeros, NaN and Inf.

Shape letters in this package: G groups of tensors, L layers, C gradient columns, R rows, W row
width. Every implementation gives the same columns by name; `table` puts them in their order.
"""

from mp_agent.probe.statistics.base import GradientStatistics, for_device

__all__ = ["GradientStatistics", "for_device"]
