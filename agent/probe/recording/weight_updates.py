"""Measures what optimizers do to the weights, on sampled steps."""

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from mp_agent.probe.optimizers.layer_slots import LayerSlot
from mp_agent.probe.optimizers.measurement import Measurement
from mp_agent.probe.optimizers.optimizer_state import OptimizerState, part_of
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.statistics.weight_updates import update_row
from mp_agent.probe.step.open_step import OpenStep, SampledRows
from mp_agent.records.columns import OPTIMIZER
from mp_agent.settings import Settings

_MIB = 2**20


class WeightUpdates:
    """Copies the weights before a step, and compares with them after it.

    The copies are as large as the local weights, up to a limit, and live for one step.
    """

    def __init__(
        self, measures: Measurement, settings: Settings, note_unsupported: Callable[[str], None]
    ) -> None:
        self._measures = measures
        self.enabled = settings.measure_updates
        """Whether updates are measured: not when switched off, nor once memory has run out."""
        self._limit_bytes = settings.update_copy_mib * _MIB
        self._note_unsupported = note_unsupported
        self._kept: dict[str, tuple[int, list[torch.Tensor | None]]] = {}
        """By optimizer: the step, and the weights [L] before it, None for those left out."""

    def keep(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Copy the weights of optimizers that are about to step, unless that was done."""
        if not self.enabled:
            return
        self._kept = {label: kept for label, kept in self._kept.items() if kept[0] == step.sequence}
        room = self._limit_bytes - sum(
            copy.nbytes for _, copies in self._kept.values() for copy in copies if copy is not None
        )
        try:
            for plan in plans:
                if plan.label not in self._kept:
                    copies, room = self._copies(plan, room)
                    self._kept[plan.label] = step.sequence, copies
        except torch.OutOfMemoryError:
            self.enabled, self._kept = False, {}
            self._note_unsupported("updates of weights, for whose copy there is no memory")

    def forget(self, label: str) -> None:
        """Let go of the copies of an optimizer that did not step."""
        self._kept.pop(label, None)

    def measure(self, step: OpenStep, plan: MeasurementPlan, optimizer: Optimizer) -> None:
        """Add the rows of an optimizer that has just stepped, while its gradients are there."""
        sequence, copies = self._kept.pop(plan.label, (0, []))
        if sequence != step.sequence or len(copies) != len(plan.slots):
            return
        state = OptimizerState.of(optimizer)
        rows_LC = torch.stack(
            [_row(state, slot, copy) for slot, copy in zip(plan.slots, copies, strict=True)]
        )
        sampled = step.sampled.setdefault(OPTIMIZER.name, SampledRows())
        sampled.rows[plan.label] = rows_LC
        sampled.totals[plan.label] = self._measures.totals_of_layers(plan, rows_LC, OPTIMIZER)

    def _copies(
        self, plan: MeasurementPlan, room: float
    ) -> tuple[list[torch.Tensor | None], float]:
        """Return copies of the weights of as many layers as there is room for, and the rest."""
        copies: list[torch.Tensor | None] = []
        for slot in plan.slots:
            weight = part_of(slot, slot.parameter)
            room -= 0 if weight is None else weight.nbytes
            copies.append(weight.clone() if weight is not None and room >= 0 else None)
        if room < 0:
            self._note_unsupported("updates of weights beyond update_copy_mib")
        return copies, room


def _row(state: OptimizerState, slot: LayerSlot, copy: torch.Tensor | None) -> torch.Tensor:
    """Return the columns [C] of one layer; none of them for tensors of other kinds."""
    if (tensors := state.tensors(slot, copy)) is None:
        device = slot.parameter.device
        return torch.full((len(OPTIMIZER.names),), torch.nan, dtype=torch.float64, device=device)
    return update_row(tensors, state.rule(slot))
