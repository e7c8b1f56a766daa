"""Which implementation measures the gradients of a device."""

import torch

from mp_agent.probe.statistics.cpu import CpuStatistics
from mp_agent.probe.statistics.interface import GradientStatistics
from mp_agent.probe.statistics.packed import PackedStatistics


def for_device(device: torch.device) -> GradientStatistics:
    """Return statistics for gradients on `device`; its scratch is made at first use and kept.

    Call it once per device: each instance holds its own scratch.
    """
    return CpuStatistics() if device.type == "cpu" else PackedStatistics(device)
