"""The rows of several nodes become one step of the run, by the columns' algebra and shares."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan

import numpy as np

from mp_agent.node.merge.coverage import (
    AssumedShares,
    ExpectedShares,
    GroupKey,
    assumed_name,
    group_key,
)
from mp_agent.node.merge.replica_digests import ReplicaDigests
from mp_agent.records.algebra import Algebra
from mp_agent.records.columns import COLUMNS, GRADIENT_COLUMN_NAMES
from mp_agent.records.merged import MergedStep, OptimizerStep
from mp_agent.records.rows import NodeRow, NodeShare, NodeStep, StepValue

Columns = tuple[float, ...]
"""The gradient columns of a row, in the order of `GRADIENT_COLUMN_NAMES`."""


@dataclass(slots=True)
class _Replica:
    """What is there of one replica of a group."""

    shards: set[int] = field(default_factory=set)
    rows: list[Columns] = field(default_factory=list)


@dataclass(slots=True)
class RowGroup:
    """The replicas of a group that may still be the one to take."""

    shard_count: int
    complete: int | None = None
    """The lowest replica of which every shard is there."""
    replicas: dict[int, _Replica] = field(default_factory=dict)

    def add(self, row: NodeRow, columns: Columns) -> None:
        """Take in a node's row, with its columns in this agent's order."""
        for number in row.replicas:
            if self.complete is not None and number >= self.complete:
                return
            replica = self.replicas.setdefault(number, _Replica())
            if replica.shards.isdisjoint(row.shards):
                replica.shards.update(row.shards)
                replica.rows.append(columns)
            if len(replica.shards) >= self.shard_count:
                self.complete = number
                self.replicas = {i: r for i, r in self.replicas.items() if i <= number}

    def chosen(self) -> list[Columns]:
        """Return the rows of the lowest complete replica, else of the one with most shards."""
        if self.complete is not None:
            return self.replicas[self.complete].rows
        return max(sorted(self.replicas.items()), key=lambda item: len(item[1].shards))[1].rows


@dataclass(frozen=True, slots=True)
class ReportColumns:
    """What the rows of a node refer to."""

    step_columns: tuple[str, ...]
    gradient_columns: tuple[str, ...]
    shares: Sequence[NodeShare]

    def fit(self, columns: Columns) -> Columns:
        """Return a row's columns in the order of this agent's; NaN where they are not there."""
        found = dict(zip(self.gradient_columns, columns, strict=True))
        values = (found.get(name, nan) for name in GRADIENT_COLUMN_NAMES)
        # One object stands for all that is absent: rows that are equal compare equal.
        return tuple(nan if isnan(value) else value for value in values)


class StepMerge:
    """One step of the run as it comes in, node by node, in any order.

    Of equal replicas one is taken, shards add up. The result is the same, but for rounding, however
    the ranks are spread over nodes.
    """

    def __init__(self, sequence: int, world_size: int) -> None:
        self.sequence = sequence
        self._world_size = world_size
        self._present = np.zeros(world_size, dtype=np.bool_)
        self._compute_seconds = np.full(world_size, nan)
        self._trainer_step: tuple[int, int] | None = None
        """The lowest rank of a node that knows the trainer's step, and that step."""
        self._time_unix_seconds = nan
        self._values: dict[str, list[StepValue]] = {}
        self._groups: dict[GroupKey, RowGroup] = {}
        self._assumed: dict[GroupKey, dict[Columns, list[int]]] = {}
        self._nonfinite_loss_ranks: list[int] = []
        self._replicas = ReplicaDigests()

    def add(
        self, step: NodeStep, terms: ReportColumns, *, arrived_unix_seconds: float | None = None
    ) -> None:
        """Take a node's rows in.

        arrived_unix_seconds: by the root's own clock; None for the root's own node, whose word
        on the time is taken. No other node's is.
        """
        ranks = list(step.ranks)
        self._present[ranks] = True
        self._compute_seconds[ranks] = step.compute_seconds
        self._nonfinite_loss_ranks.extend(step.nonfinite_loss_ranks)
        if arrived_unix_seconds is None:
            self._time_unix_seconds = step.time_unix_seconds
        elif self._time_unix_seconds != self._time_unix_seconds:
            self._time_unix_seconds = arrived_unix_seconds
        told = step.step != step.sequence
        if told and (self._trainer_step is None or ranks[0] < self._trainer_step[0]):
            self._trainer_step = (ranks[0], step.step)
        for name, value in zip(terms.step_columns, step.values, strict=True):
            if name in COLUMNS:
                self._values.setdefault(name, []).append(value)
        for row in step.rows:
            self._add_row(row, terms)
        self._replicas.add_weights(step.digests)

    def merged(self, expected_shares: ExpectedShares, assumed: AssumedShares) -> MergedStep:
        """Return the step; `assumed` learns from its rows before they are merged.

        A column that no rank observed, or whose value is beyond float64, is absent.
        """
        for key, rows in self._assumed.items():
            ranks = sum(map(len, rows.values()))
            assumed.observe(assumed_name(key), ranks=ranks, distinct_rows=len(rows))
        # Plain replicas that step with gradients of their own: that is how local SGD drifts.
        apart = {assumed_name(key) for key, rows in self._assumed.items() if len(rows) > 1}
        step_values = self._step_values()
        measured = step_values.get("gradients_measured") != 0.0
        # Of a step that some ranks left out by plan, the others' part is no statement on the run.
        chosen = self._chosen(assumed) if measured else {}
        whole = self._whole(assumed) if measured else set[GroupKey]()
        values = {**step_values, **_gradients(chosen, expected_shares.of_run)}
        return MergedStep(
            sequence=self.sequence,
            step=self._trainer_step[1] if self._trainer_step else self.sequence,
            time_unix_seconds=self._time_unix_seconds,
            values=values,
            world_size=self._world_size,
            present_ranks=frozenset(np.flatnonzero(self._present).tolist()),
            gradients_complete=expected_shares.complete(whole, expected_shares.of_run),
            nonfinite_loss_ranks=tuple(sorted(self._nonfinite_loss_ranks)),
            compute_seconds=self._observed_compute_seconds(),
            optimizers=dict(self._optimizers(chosen, whole, expected_shares)),
            optimizers_held=frozenset(
                name
                for _, label in expected_shares.groups
                if (name := expected_shares.name_of(label)) is not None
            ),
            replicas=self._replicas.compared(
                skipped=values.get("skipped", 0.0) > 0.0,
                reduced=values.get("gradients_reduced", 1.0) > 0.0 or self._look_reduced(values),
                replicated=lambda group: assumed.replicated(group) and group not in apart,
            ),
        )

    def _optimizers(
        self,
        chosen: Mapping[GroupKey, Iterable[Columns]],
        whole: Collection[GroupKey],
        expected_shares: ExpectedShares,
    ) -> Iterator[tuple[str, OptimizerStep]]:
        """Yield those that had gradients, by the name that they are shown under."""
        for label in sorted({optimizer for _, optimizer in chosen}):
            name, values = expected_shares.name_of(label), _gradients(chosen, (label,))
            if name is not None and values.get("elements") != 0.0:
                complete, joint = (
                    expected_shares.complete(whole, (label,)),
                    label in expected_shares.of_run,
                )
                yield (
                    name,
                    OptimizerStep(
                        sequence=self.sequence, values=values, complete=complete, joint=joint
                    ),
                )

    def _add_row(self, row: NodeRow, terms: ReportColumns) -> None:
        share, columns = terms.shares[row.share], terms.fit(row.columns)
        key = group_key(share)
        if share.assumed:
            self._assumed.setdefault(key, {}).setdefault(columns, []).extend(row.ranks)
            return
        if key not in self._groups:
            self._groups[key] = RowGroup(share.shard_count)
        self._groups[key].add(row, columns)
        self._replicas.add_gradients(key, row)

    def _chosen(self, assumed: AssumedShares) -> dict[GroupKey, list[Columns]]:
        """Return the rows that are added up, by group."""
        chosen = {key: group.chosen() for key, group in self._groups.items()}
        for key, rows in self._assumed.items():
            if assumed.independent(assumed_name(key)):
                chosen[key] = [columns for columns, ranks in rows.items() for _ in ranks]
            else:
                chosen[key] = [_of_lowest_rank(rows)]
        return chosen

    def _whole(self, assumed: AssumedShares) -> set[GroupKey]:
        """Return the groups of which nothing is missing."""
        whole = {key for key, group in self._groups.items() if group.complete is not None}
        for key, rows in self._assumed.items():
            everyone = sum(map(len, rows.values())) == self._world_size
            if everyone or not assumed.independent(assumed_name(key)):
                whole.add(key)
        return whole

    def _look_reduced(self, values: Mapping[str, float]) -> bool:
        """Return whether the gradients show that they were reduced: equal, though of other data."""
        telling = values.get("sum_squares", 0.0) > 0.0 and not any(
            values.get(name, 0.0) > 0.0 for name in ("nan_elements", "inf_elements")
        )
        return telling and self._replicas.gradients_agree()

    def _step_values(self) -> dict[str, float]:
        values = {
            name: COLUMNS[name].algebra.merged([v.value for v in found], [v.count for v in found])
            for name, found in self._values.items()
            if COLUMNS[name].algebra is not Algebra.OWN
        }
        return {name: value for name, value in values.items() if isfinite(value)}

    def _observed_compute_seconds(self) -> dict[int, float]:
        ranks = np.flatnonzero(np.isfinite(self._compute_seconds))
        return dict(zip(ranks.tolist(), self._compute_seconds[ranks].tolist(), strict=True))


def _of_lowest_rank(rows: Mapping[Columns, Sequence[int]]) -> Columns:
    return min(rows.items(), key=lambda item: min(item[1]))[0]


def _gradients(
    chosen: Mapping[GroupKey, Iterable[Columns]], optimizers: Collection[str]
) -> dict[str, float]:
    """Return the merged gradient columns of some optimizers; without those that no row has."""
    rows = [row for key, rows in chosen.items() if key[1] in optimizers for row in rows]
    if not rows:
        return {}
    values = {
        name: COLUMNS[name].algebra.merged(column)
        for name, column in zip(GRADIENT_COLUMN_NAMES, zip(*rows, strict=True), strict=True)
    }
    return {name: value for name, value in values.items() if isfinite(value)}
