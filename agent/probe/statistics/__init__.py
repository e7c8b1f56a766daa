"""What a set of gradients amounts to: norm, largest magnitude, zeros, NaN and Inf.

Shape letters in this package: G groups of tensors, L layers, C gradient columns, R rows, W row
width. Every implementation gives the same columns by name; `pieces` puts them in their order.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from mp_agent.probe.statistics.fused.build import DISTRIBUTION_KERNELS, launchable
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from mp_agent.probe.statistics.host import CpuStatistics
from mp_agent.probe.statistics.packed import PackedStatistics


class GradientStatistics(Protocol):
    """Statistics of gradients divided by the loss scale, where the gradients are.

    Columns are `GRADIENT_COLUMN_NAMES`. Counts are exact; sum of squares and largest magnitude
    are over the finite elements and are themselves always finite (a sum beyond float64 is its
    largest number). Gradients are floating point or complex (real and imaginary parts count
    separately), of any layout, and are only read. Of a sparse gradient the stored values count;
    coalescing it is the one thing that makes the host wait for an accelerator.
    """

    def totals(
        self, groups: Sequence[Sequence[torch.Tensor]], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [G, C], one row for all tensors of a group, on the gradients' device."""
        ...

    def layers(
        self, tensors: Sequence[torch.Tensor | None], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [L, C], one row per tensor, zeros for None, on the gradients' device."""
        ...

    def distribution(
        self,
        tensors: Sequence[torch.Tensor | None],
        inverse_scale: float | torch.Tensor,
        loss_scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """Return float64 [L, C] of `DISTRIBUTION`, one row per tensor, on the gradients' device.

        loss_scale: that of the step, whether or not the gradients are still multiplied by it; the
        columns of FP16 are NaN where it is None or not finite. None among the tensors has no
        elements. Elements whose unscaled value is not finite count as such.
        """
        ...

    def digests(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return float64 [N]: of each tensor its bits as integers, summed modulo 2^32.

        On the tensors' device. The order of elements does not matter. Narrower numbers are widened
        to 32 bits, wider ones are two integers each.
        """
        ...


def for_device(
    device: torch.device, *, fused_kernels: bool = True, distribution: bool = False
) -> GradientStatistics:
    """Return statistics for gradients on `device`; its scratch is made at first use and kept.

    Call it once per device: each instance holds its own scratch. On CUDA it may wait until the
    kernels are compiled; where that cannot be, or without `fused_kernels`, stock operations do.
    distribution: whether there are to be kernels for `distribution`, too; else stock operations do.
    """
    if device.type == "cpu":
        return CpuStatistics()
    launches = launchable(device) if fused_kernels else None
    if launches is None:
        return PackedStatistics(device)
    return FusedStatistics(
        device, launches, launchable(device, DISTRIBUTION_KERNELS) if distribution else None
    )
