"""What one rank's gradients contribute to the numbers that the ranks agree on."""

from collections.abc import Callable
from typing import Final

import torch

from mp_agent.probe.optimizers.measurement import Measurement
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.scalars import Scalar
from mp_agent.records.columns import GRADIENT_POSITIONS

SQUARES: Final = 0
"""Sum of squares of the finite elements, unscaled; over all ranks that of the whole model."""
NONFINITE: Final = 1
"""Elements that are NaN or Inf."""
SCALER_SKIPS: Final = 2
"""1 where a GradScaler skips the update."""
FAILURES: Final = 3
"""1 where the gradients could not be measured."""
LOSS_SCALES: Final = 4
"""The loss scale of the gradients; 0 without a GradScaler."""
NUMBERS: Final = 5

_SUM_SQUARES = GRADIENT_POSITIONS["sum_squares"]
_NAN, _INF = GRADIENT_POSITIONS["nan_elements"], GRADIENT_POSITIONS["inf_elements"]


class GradientReader:
    """Measures gradients as an optimizer is about to use them."""

    def __init__(self, note_unsupported: Callable[[str], None], *, fused_kernels: bool) -> None:
        self._measurement = Measurement(note_unsupported, fused_kernels=fused_kernels)
        self._note_unsupported = note_unsupported

    def read(self, plan: MeasurementPlan, inverse_scale: Scalar, ranks: int) -> torch.Tensor:
        """Return this rank's part [NUMBERS] of the sums, on the gradients' device.

        inverse_scale: 1 / the factor by which the gradients are still multiplied. A tensor of
        which `replica_count` ranks hold a copy counts with that part of it; one that nothing
        shows to be split or copied counts as a copy on all ranks.
        """
        numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=plan.device)
        gradients = plan.gradients(self._note_unsupported)
        if not plan.shares or all(gradient is None for gradient in gradients):
            return numbers
        totals_GC = self._measurement.totals(plan, gradients, inverse_scale)
        for row, share in enumerate(plan.shares):
            copies = ranks if share.assumed else share.replica_count
            numbers[SQUARES] += totals_GC[row, _SUM_SQUARES] / copies
            numbers[NONFINITE] += totals_GC[row, _NAN] + totals_GC[row, _INF]
        return numbers


def skipped_by_scaler(device: torch.device) -> torch.Tensor:
    """Return the part [NUMBERS] of a rank whose scaler skips the update."""
    numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=device)
    numbers[SCALER_SKIPS] = 1.0
    return numbers


def failed(device: torch.device) -> torch.Tensor:
    """Return the part [NUMBERS] of a rank that cannot measure its gradients."""
    numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=device)
    numbers[FAILURES] = 1.0
    return numbers
