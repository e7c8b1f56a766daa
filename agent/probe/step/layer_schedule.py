"""When the probe measures gradients, and when every layer beyond their totals."""

from collections.abc import Mapping
from math import isfinite, isnan, sqrt

import torch

from mp_agent.probe.step.dense_sampling import DenseSampling
from mp_agent.probe.step.overhead_budget import OverheadBudget
from mp_agent.records.columns import GRADIENT_POSITIONS
from mp_agent.records.steps import FloatArray

_EARLY_STEPS = 100
_EARLY_INTERVAL = 10
_TROUBLE_STEPS_IN_A_ROW = 3

_SUM_SQUARES = GRADIENT_POSITIONS["sum_squares"]
_NONFINITE = tuple(GRADIENT_POSITIONS[name] for name in ("nan_elements", "inf_elements"))


class LayerSchedule:
    """Decides per step whether its layers are measured: on schedule, on trouble, and after it.

    Lasting trouble is measured `_TROUBLE_STEPS_IN_A_ROW` times and then every 10 steps, so
    that a run that is lost anyway does not pay twice on every step. After steps whose gradients
    are not finite, or that a scaler or the guard skipped, the schedule itself is denser
    (`DenseSampling`).
    """

    def __init__(
        self,
        interval_steps: int,
        thresholds: Mapping[str, float],
        budget: OverheadBudget | None = None,
    ) -> None:
        """budget: stretches the intervals; None is no limit."""
        self.budget = OverheadBudget(1.0) if budget is None else budget
        self._interval_steps = interval_steps
        self._norm_limit = thresholds["grad_norm_high"]
        self._trouble_in_a_row: dict[str, int] = {}
        self._after_trouble = DenseSampling()

    def due(self, sequence: int) -> bool:
        """Return whether step `sequence` is one of those that are always measured."""
        early = sequence <= _EARLY_STEPS and sequence % _EARLY_INTERVAL == 0
        dense = self._after_trouble.due(sequence, self.budget.layer_factor)
        return sequence == 1 or early or dense or sequence % self.interval_steps == 0

    def compares(self, sequence: int) -> bool:
        """Return whether what ranks hold is compared before the update of step `sequence`.

        Of the second step, so that what the first one did wrong is found at once.
        """
        return sequence == 2 or self.due(sequence)

    def note_step(
        self, sequence: int, scalars: Mapping[str, float], totals_GC: FloatArray | None
    ) -> None:
        """Receive what a step, complete and on the host, turned out to be.

        scalars: step columns by name. totals_GC: [G, C], None where no gradients were measured.

        What the ranks know alike counts: replicas have the same gradients, and a norm that
        clipping computed and the flags of a skipped step, by a scaler or by the guard, are of all
        shards. The norm of a rank's own shards is not, nor is its own loss.
        """
        if sequence > _EARLY_STEPS and (
            scalars.get("skipped", 0.0) > 0.0
            or scalars.get("guard_skip_update", 0.0) > 0.0
            or not isfinite(scalars.get("clip_norm", 0.0))
            or (totals_GC is not None and bool((totals_GC[:, _NONFINITE] > 0.0).any()))
        ):
            self._after_trouble.note_trouble(sequence)

    def follows_trouble(self, sequence: int) -> bool:
        """Return whether step `sequence` lies within a denser stretch of the schedule."""
        return self._after_trouble.lasts(sequence)

    @property
    def interval_steps(self) -> int:
        """Steps between two measurements of all layers, after the early ones."""
        return self._interval_steps * self.budget.layer_factor

    def due_after(self, sequence: int) -> bool:
        """Return whether what is seen only in a forward pass is measured in the step after this.

        On schedule, on the first step for which the model is known, and after trouble.
        """
        return sequence == 1 or self.due(sequence + 1) or self._is_troubled

    @property
    def _is_troubled(self) -> bool:
        """Whether the last step that was judged calls for measuring the layers."""
        return any(map(_is_looked_into, self._trouble_in_a_row.values()))

    def measures(self, sequence: int) -> bool:
        """Return whether gradients are measured on step `sequence` at all."""
        return sequence % self.budget.stride == 0 or self.due(sequence)

    def wanted_for_trouble(
        self, totals_GC: torch.Tensor, label: str = "", *, norm_is_known: bool = True
    ) -> bool:
        """Return whether these totals [G, C] (on the CPU) call for measuring the layers.

        Call once per step and optimizer, which `label` names, in order: it remembers for how long
        there has been trouble. norm_is_known: False while the totals are still scaled.
        """
        if not self._is_trouble(totals_GC, norm_is_known):
            self._trouble_in_a_row[label] = 0
            return False
        in_a_row = self._trouble_in_a_row[label] = self._trouble_in_a_row.get(label, 0) + 1
        return _is_looked_into(in_a_row)

    def _is_trouble(self, totals_GC: torch.Tensor, norm_is_known: bool) -> bool:
        measured = [row for row in totals_GC.tolist() if not isnan(row[_SUM_SQUARES])]
        nonfinite = any(row[column] > 0 for row in measured for column in _NONFINITE)
        if nonfinite or not norm_is_known:
            return nonfinite
        return sqrt(sum(row[_SUM_SQUARES] for row in measured)) > self._norm_limit


def _is_looked_into(steps_in_a_row: int) -> bool:
    """Return whether the layers are measured after so many steps of trouble."""
    if steps_in_a_row <= 0:
        return False
    return steps_in_a_row <= _TROUBLE_STEPS_IN_A_ROW or steps_in_a_row % _EARLY_INTERVAL == 0
