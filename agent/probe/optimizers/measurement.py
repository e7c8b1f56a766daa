"""Statistics of the gradients and weights of a plan, by the means of the device they lie on."""

from collections.abc import Callable, Hashable, Sequence

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants
from mp_agent.probe.isolation import has_memory
from mp_agent.probe.optimizers.plan import MeasurementPlan, local_of
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.statistics import GradientStatistics, for_device
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.probe.statistics.table import folded_rows
from mp_agent.records.columns import GRADIENTS, ColumnFamily

UNFUSED = "measuring gradients by fused kernels, which cannot be compiled"


class Measurement:
    """Keeps the working memory of each device's statistics, of each stream its own.

    Streams need not wait for each other, so what one of them works on no other may touch.
    note_unsupported: called with what a GPU's gradients have to be measured without.
    distribution: whether kernels for `distribution` are compiled as well.
    """

    def __init__(
        self,
        note_unsupported: Callable[[str], None],
        *,
        fused_kernels: bool = True,
        distribution: bool = False,
    ) -> None:
        self._note_unsupported = note_unsupported
        self._fused_kernels = fused_kernels
        self._of_distribution = distribution
        self._statistics: dict[Hashable, GradientStatistics] = {}
        self._constants = DeviceConstants()

    def layers(
        self, plan: MeasurementPlan, gradients: Sequence[torch.Tensor | None], inverse_scale: Scalar
    ) -> torch.Tensor:
        """Return the statistics [L, C] of each layer, on the gradients' device."""
        return self._statistics_on(plan.device).layers(gradients, inverse_scale)

    def totals(
        self, plan: MeasurementPlan, gradients: Sequence[torch.Tensor | None], inverse_scale: Scalar
    ) -> torch.Tensor:
        """Return the statistics [G, C] of each share, on the gradients' device."""
        return self._statistics_on(plan.device).totals(plan.by_share(gradients), inverse_scale)

    def distribution(
        self,
        plan: MeasurementPlan,
        gradients: Sequence[torch.Tensor | None],
        inverse_scale: Scalar,
        loss_scale: Scalar | None,
    ) -> torch.Tensor:
        """Return how each layer's gradient is distributed [L, C], on the gradients' device."""
        statistics = self._statistics_on(plan.device)
        return statistics.distribution(gradients, inverse_scale, loss_scale)

    def totals_of_layers(
        self, plan: MeasurementPlan, rows_LC: torch.Tensor, family: ColumnFamily = GRADIENTS
    ) -> torch.Tensor:
        """Return [G, C]: the columns' algebra applied to the layers of each share, on device."""
        if len(plan.shares) == 1:
            return folded_rows(rows_LC, family)[None]
        places = (self._constants.on(plan.device, rows) for rows in plan.rows_of_share)
        return torch.stack(
            [folded_rows(rows_LC.index_select(0, place), family) for place in places]
        )

    def together(self, device: torch.device, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the statistics [C] of some gradients on a device, as they are."""
        return self._statistics_on(device).totals([gradients], 1.0)[0]

    def alone(self, plan: MeasurementPlan, gradient: torch.Tensor) -> None:
        """Measure one gradient in both ways, for what that raises."""
        statistics = self._statistics_on(plan.device)
        statistics.layers([gradient], 1.0)
        statistics.totals([[gradient]], 1.0)

    def digests(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the bits of each tensor [N], left on their device."""
        return self._statistics_on(device).digests(tensors)

    def _statistics_on(self, device: torch.device) -> GradientStatistics:
        stream = (device, accelerator.current_stream(device))
        found = self._statistics.get(stream)
        if found is None:
            found = accelerator.kept_per_stream(
                self._statistics, stream, lambda: self._made(device)
            )
        return found

    def _made(self, device: torch.device) -> GradientStatistics:
        statistics = for_device(
            device, fused_kernels=self._fused_kernels, distribution=self._of_distribution
        )
        stock = isinstance(statistics, PackedStatistics)
        if device.type == "cuda" and stock and self._fused_kernels:
            self._note_unsupported(UNFUSED)
        return statistics


_FEW = 32


def few_elements(tensor: torch.Tensor, part: slice | None = None) -> torch.Tensor | None:
    """Return some elements from the middle of this rank's part; None of tensors of other kinds."""
    local = local_of(tensor)
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
        return None
    if not has_memory(local):
        return None
    if part is not None:
        if local.dim() != 1 or part.stop > local.numel():
            return None
        local = local[part]
    while local.dim() > 1 and local.numel() > _FEW and local.shape[0] > 1:
        local = local[local.shape[0] // 2]
    flat = local.reshape(-1)
    start = max(0, (flat.numel() - _FEW) // 2)
    return flat[start : start + _FEW]
