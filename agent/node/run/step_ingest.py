"""Folds the steps and layers of an attempt into the run's account: each once, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mp_agent.exporters.status_page.history import StepHistory
from mp_agent.node.accounting.accumulator import Accumulator
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.collect.attempt import LocalStep
from mp_agent.records.columns import FAMILIES, ColumnFamily
from mp_agent.records.merged import MergedStep
from mp_agent.records.tensor_collections import TensorCollection

_STEPS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class _ClosedStep:
    step: int
    """The trainer's own."""
    judged: Mapping[str, frozenset[str]]
    """By family: the optimizers whose norms counted."""


class StepIngest:
    """The only writer of a run's account and its history."""

    def __init__(self, account: Accumulator, *, counted_sequence: int = 0) -> None:
        """counted_sequence: step up to which an earlier agent has counted this node's ranks."""
        self.account = account
        self.history = StepHistory()
        """The last steps, for the status page."""
        self.counted_sequence = counted_sequence
        """Steps up to this one are in the counters of this node's ranks."""
        self._closed: dict[int, _ClosedStep] = {}
        """By sequence number, for the layers that follow."""

    def begin_attempt(self) -> None:
        """Count the next attempt's steps from its first on; counters continue."""
        self.account.begin_attempt()
        self.history.clear()
        self.counted_sequence = 0
        self._closed = {}

    def fold_local(self, step: LocalStep) -> None:
        """Count what this node's ranks observed, unless an earlier node agent has."""
        if step.row.sequence > self.counted_sequence:
            self.counted_sequence = step.row.sequence
            for rank, values in step.ranks.items():
                self.account.fold_rank(rank, values)

    def fold_step(self, step: MergedStep) -> None:
        """Add a step of the run."""
        self.account.fold_step(step)
        self.history.add(step)
        self.history.loss_misread = self.account.progress.misreadings.scaled
        self._closed[step.sequence] = _ClosedStep(
            step.step, {family.name: _judged_optimizers(step, family) for family in FAMILIES}
        )
        if len(self._closed) > _STEPS_KEPT:
            del self._closed[next(iter(self._closed))]

    def fold_layers(self, table: MergedTable, collections: Sequence[TensorCollection] = ()) -> None:
        """Add the layers of a sampled step; the step itself came before.

        collections: those that the script has defined.
        """
        closed = self._closed.get(table.sequence, _ClosedStep(table.sequence, {}))
        for name, layers in table.families.items():
            judged = closed.judged.get(name, frozenset())
            self.account.fold_layers(
                table.sequence,
                layers.judged_of(judged),
                step_judged=bool(judged),
                step=closed.step,
                collections=collections,
            )


def _judged_optimizers(step: MergedStep, family: ColumnFamily) -> frozenset[str]:
    """Return the optimizers whose rows of a family count; "" stands for the run's own."""
    whole = step.counts(family)
    judged = {
        name
        for name, own in step.optimizers.items()
        if (whole if own.joint else own.counts(family))
    }
    return frozenset(judged | ({""} if whole else set()))
