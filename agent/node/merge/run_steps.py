"""Merges the nodes' rows of a step into the run's, with what the ranks have reduced."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite, nan

import numpy as np
import numpy.typing as npt

from mp_agent.node.merge.coverage import (
    AssumedShares,
    ExpectedShares,
    GroupKey,
    LayerCopies,
    group_key,
)
from mp_agent.node.merge.family_rows import FamilyRows, PlainRows, Rows
from mp_agent.node.merge.replicas import (
    PlainParameters,
    ReplicaDigests,
    StepFacts,
    tensor_of,
)
from mp_agent.node.merge.step_blocks import AlikeNodes, AlikeSteps, BlockRows, UnitedSteps
from mp_agent.records.columns import (
    FAMILIES,
    FEW_WEIGHTS,
    GRADIENTS,
    STEP_COLUMNS_BY_NAME,
    WEIGHTS,
    ColumnFamily,
)
from mp_agent.records.columns.column import Algebra
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.merged import MergedStep, OptimizerStep, RankValues
from mp_agent.records.node_report import NodeRow, NodeShare, NodeStep, OwnNonfinite, StepValue
from mp_agent.records.schema import FamilyColumns
from mp_agent.records.steps import FloatArray


def completed(step: MergedStep, found: GlobalStatistics) -> MergedStep:
    """Return the step with the columns and gradients that all ranks have reduced.

    Only where ranks are missing from it, and none from the reduction: nothing is counted twice.
    What is not reduced stays that of the ranks that are there: other families, comparisons of
    replicas, the parts of several optimizers.
    """
    by_all = found.present_ranks == found.world_size == step.world_size
    if not by_all or not step.missing_ranks:
        return step
    families = {name: own for name, own in step.families.items() if name != GRADIENTS.name}
    if found.gradients:
        families[GRADIENTS.name] = found.gradients
    complete = step.complete - {GRADIENTS.name}
    return replace(
        step,
        step=found.step,
        columns=found.columns,
        families=families,
        complete=complete | {GRADIENTS.name} if found.complete else complete,
        present_ranks=everyone(step.world_size),
    )


@lru_cache(maxsize=8)
def everyone(world_size: int) -> frozenset[int]:
    """Return all ranks."""
    return frozenset(range(world_size))


@dataclass(frozen=True, slots=True)
class ReportColumns:
    """What the rows of a node refer to."""

    step_columns: tuple[str, ...]
    families: Sequence[FamilyColumns]
    shares: Sequence[NodeShare]


class StepMerge:
    """One step of the run as it comes in, node by node, in any order.

    Of equal replicas one is taken, shards add up. The result is the same, but for rounding, however
    the ranks are spread over nodes.
    """

    def __init__(
        self, sequence: int, world_size: int, families: Iterable[ColumnFamily] = FAMILIES
    ) -> None:
        self.sequence = sequence
        self._world_size = world_size
        self._present = np.zeros(world_size, dtype=np.bool_)
        self._compute_seconds = np.full(world_size, nan)
        self._trainer_step: tuple[int, int] | None = None
        """The lowest rank of a node that knows the trainer's step, and that step."""
        self._time_unix_seconds = nan
        self._values: dict[str, list[StepValue]] = {}
        self._arrays: dict[str, list[tuple[FloatArray, int]]] = {}
        """Step columns of nodes whose rows are of one kind, each with the ranks that a value is
        of."""
        self._in_blocks: dict[AlikeNodes, AlikeSteps] = {}
        self._known = {family.name: family for family in families}
        self._families: dict[str, FamilyRows] = {}
        """Of those of which there are rows."""
        self._nonfinite_loss_ranks: list[int] = []
        self._nonfinite_gradients: list[OwnNonfinite] = []
        self._replicas = ReplicaDigests()
        self._batches: dict[str, dict[float, list[int]]] = {}
        self._losses = np.full(world_size, nan)
        self._batch_rows: dict[int, float] = {}
        self._any_split = False
        """Whether any tensor is known not to lie on all ranks as a whole."""
        self._any_of_all = False
        """Whether any tensor is known to lie on all ranks."""

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
        if step.nonfinite_gradients is not None:
            self._nonfinite_gradients.append(step.nonfinite_gradients)
        self._note_time(step.time_unix_seconds, arrived_unix_seconds)
        self._note_step(ranks[0], step.step)
        for name, value in zip(terms.step_columns, step.values, strict=True):
            if value.count and name in STEP_COLUMNS_BY_NAME:
                self._values.setdefault(name, []).append(value)
        for row in step.rows:
            self._add_row(row, terms)
        self._replicas.add_samples(step.samples)
        for batch in step.batches:
            alike = self._batches.setdefault(batch.of, {}).setdefault(batch.digest, [])
            alike.extend(batch.ranks)
        if step.losses:
            self._losses[ranks] = step.losses
        if step.batch_rows:
            sizes = zip(ranks, step.batch_rows, strict=True)
            self._batch_rows.update((rank, size) for rank, size in sizes if isfinite(size))

    def add_block(
        self, rows: BlockRows, at: int, *, arrived_unix_seconds: float | None = None
    ) -> None:
        """As `add`, of the step that has this place in a node's block."""
        block = rows.block
        self._note_time(block.times_unix_seconds[at], arrived_unix_seconds)
        self._note_step(block.form.ranks[0], block.steps[at])
        nodes = rows.own.nodes
        alike = self._in_blocks.get(nodes)
        if alike is None:
            alike = self._in_blocks[nodes] = AlikeSteps(nodes)
        alike.add(rows, at)

    def merged(
        self,
        expected_shares: ExpectedShares,
        assumed: AssumedShares,
        layers: LayerCopies | None = None,
    ) -> MergedStep:
        """Return the step; `assumed` learns from its rows before they are merged.

        A column that no rank observed, or whose value is beyond float64, is absent. layers: what
        is compared of the layers of this step, as far as it is here.
        """
        for alike in self._in_blocks.values():
            self._add_alike(alike.united())
        self._in_blocks.clear()
        values, of_run = self._step_values(), expected_shares.of_run
        facts = self._facts(values)
        plain = PlainParameters(*map(self._plain_rows, (GRADIENTS, WEIGHTS, FEW_WEIGHTS)))
        replicas, reduction = self._replicas.compared(
            plain,
            assumed,
            step=facts,
            layers=layers,
        )
        gradients, weights = (
            {} if (own := self._families.get(family.name)) is None else own.of_homes(assumed)
            for family in (GRADIENTS, WEIGHTS)
        )
        undecided = PlainParameters(gradients, weights, few_weights={}).teach_of_homes(
            assumed, alike_at_first=facts.alike_at_first and not self._any_of_all
        )
        undecided += plain.uneven(assumed)
        # Of a step that some ranks left out by plan, the others' part is no statement on the run.
        left_out = values.get("gradients_measured") == 0.0
        merged = {
            name: self._family_step(own, assumed, undecided)
            for name, own in self._families.items()
            if not (left_out and name == GRADIENTS.name) and not own.family.compared_only
        }
        families = {name: found for name, own in merged.items() if (found := own.values(of_run))}
        return MergedStep(
            sequence=self.sequence,
            step=self._trainer_step[1] if self._trainer_step else self.sequence,
            time_unix_seconds=self._time_unix_seconds,
            columns=values,
            families=families,
            complete=_complete(merged, expected_shares, of_run),
            world_size=self._world_size,
            present_ranks=everyone(self._world_size)
            if self._present.all()
            else frozenset(np.flatnonzero(self._present).tolist()),
            nonfinite_loss_ranks=tuple(sorted(self._nonfinite_loss_ranks)),
            nonfinite_gradient_ranks=_first_ranks(self._nonfinite_gradients),
            compute_seconds=RankValues.finite(self._compute_seconds),
            optimizers=dict(self._optimizers(merged, expected_shares)),
            optimizers_held=frozenset(
                name
                for _, label in expected_shares.groups
                if (name := expected_shares.name_of(label)) is not None
            ),
            replicas=replicas,
            reduction=reduction,
            independent=assumed.none_copied
            and facts.wrapper_reduced is None
            and not facts.any_split,
            batches=self._batches,
            losses=RankValues.finite(self._losses),
            batch_rows=dict(sorted(self._batch_rows.items())),
            undecided=tuple(map(tensor_of, undecided)),
        )

    def _note_time(self, own_unix_seconds: float, arrived_unix_seconds: float | None) -> None:
        if arrived_unix_seconds is None:
            self._time_unix_seconds = own_unix_seconds
        elif self._time_unix_seconds != self._time_unix_seconds:
            self._time_unix_seconds = arrived_unix_seconds

    def _note_step(self, rank: int, step: int) -> None:
        known = step != self.sequence
        if known and (self._trainer_step is None or rank < self._trainer_step[0]):
            self._trainer_step = (rank, step)

    def _add_alike(self, steps: UnitedSteps) -> None:
        kind, ranks = steps.kind, steps.alike.ranks
        self._present[ranks] = True
        self._compute_seconds[ranks] = steps.compute_seconds
        if kind.has_losses:
            self._losses[ranks] = steps.losses
        for place, (name, count) in enumerate(zip(kind.names, kind.counts, strict=True)):
            if name:
                found = (steps.values_NW[:, place], count)
                self._arrays.setdefault(name, []).append(found)
        for number, row in enumerate(kind.rows):
            self._note_split(row.share)
            if (family := self._rows_of(row.family)) is None:
                continue
            rows = steps.alike.rows[number]
            family.add_alike(rows, row.share, steps.columns(row, len(family.family.names)))
            if rows.compared and not row.share.assumed:
                for form, digests in steps.rows(number):
                    self._replicas.add_rows(family.family, row.key, form, digests)

    def _rows_of(self, name: str) -> FamilyRows | None:
        """Return a family's rows to add to; None where it is of another release."""
        if name not in self._families and name in self._known:
            self._families[name] = FamilyRows(self._known[name])
        return self._families.get(name)

    def _note_split(self, share: NodeShare) -> None:
        if not (share.family or share.assumed):
            self._any_split |= share.replica_count < self._world_size
            self._any_of_all |= share.shard_count * share.replica_count >= self._world_size

    def _plain_rows(self, family: ColumnFamily) -> Mapping[str, PlainRows]:
        rows = self._families.get(family.name)
        return {} if rows is None else rows.plain

    def _facts(self, values: Mapping[str, float]) -> StepFacts:
        rows = self._families.get(GRADIENTS.name)
        found = {} if rows is None else rows.any_replica()
        losses = sum(value.count for value in self._values.get("loss", ()))
        losses += sum(len(own) * count for own, count in self._arrays.get("loss", ()))
        losses += len(self._nonfinite_loss_ranks)
        reduced = values.get("gradients_reduced")
        return StepFacts(
            skipped=values.get("skipped", 0.0) > 0.0,
            wrapper_reduced=None if reduced is None else reduced > 0.0,
            gradients_count=found.get("sum_squares", 0.0) > 0.0 and GRADIENTS.counts(found),
            left_out=values.get("gradients_measured") == 0.0,
            any_split=self._any_split,
            alike_at_first=losses in (0, int(self._present.sum())),
        )

    def _family_step(
        self, own: FamilyRows, assumed: AssumedShares, undecided: Collection[str]
    ) -> "_FamilyStep":
        chosen, whole = own.chosen(assumed), own.whole(assumed, self._world_size)
        if own.family.of_some_ranks and self._present.all():
            whole |= chosen.keys()
        return _FamilyStep(own, chosen, whole - own.groups_of(undecided, assumed))

    def _optimizers(
        self, merged: Mapping[str, "_FamilyStep"], expected_shares: ExpectedShares
    ) -> Iterator[tuple[str, OptimizerStep]]:
        """Yield those of which anything was measured, by the name that they are shown under."""
        for label in sorted({key[1] for own in merged.values() for key in own.chosen}):
            name = expected_shares.name_of(label)
            families = {
                family: values
                for family, own in merged.items()
                if any(key[1] == label for key in own.chosen)
                and (values := own.values((label,))).get(own.rows.family.size) != 0.0
            }
            if name is not None and families:
                yield (
                    name,
                    OptimizerStep(
                        sequence=self.sequence,
                        families=families,
                        complete=_complete(merged, expected_shares, (label,)),
                        joint=label in expected_shares.of_run,
                    ),
                )

    def _add_row(self, row: NodeRow, terms: ReportColumns) -> None:
        sent, share = terms.families[row.family], terms.shares[row.share]
        self._note_split(share)
        if (family := self._rows_of(sent.name)) is not None:
            family.add(row, share, sent.columns)
            if not share.assumed:
                self._replicas.add_rows(family.family, group_key(share), row, row.digests)

    def _step_values(self) -> dict[str, float]:
        values = {}
        for name in self._values | self._arrays:
            algebra = STEP_COLUMNS_BY_NAME[name].algebra
            if algebra is Algebra.OWN:
                continue
            counts_N = self._counts(name) if algebra is Algebra.MEAN else None
            values[name] = algebra.merged_array(self._column(name), counts_N)
        return {name: value for name, value in values.items() if isfinite(value)}

    def _column(self, name: str) -> FloatArray:
        """Return the values of a step column."""
        single = [value.value for value in self._values.get(name, ())]
        arrays = [own for own, _ in self._arrays.get(name, ())]
        return np.concatenate([single, *arrays])

    def _counts(self, name: str) -> npt.NDArray[np.int64]:
        """Return of how many ranks each value of a step column is."""
        single = [value.count for value in self._values.get(name, ())]
        arrays = [(len(own), count) for own, count in self._arrays.get(name, ())]
        return np.repeat(
            np.array([*single, *(count for _, count in arrays)], dtype=np.int64),
            [1] * len(single) + [size for size, _ in arrays],
        )


@dataclass(frozen=True, slots=True)
class _FamilyStep:
    """A family's rows of which each group's were chosen."""

    rows: FamilyRows
    chosen: Rows
    whole: Collection[GroupKey]
    _merged: dict[frozenset[str], Mapping[str, float]] = field(default_factory=dict)

    def values(self, optimizers: Collection[str]) -> Mapping[str, float]:
        """Return the columns of some optimizers together."""
        own = frozenset(key[1] for key in self.chosen if key[1] in optimizers)
        if own not in self._merged:
            self._merged[own] = self.rows.values(self.chosen, own)
        return self._merged[own]


def _first_ranks(found: Sequence[OwnNonfinite]) -> tuple[int, ...]:
    """Return the ranks of the first backward after which any rank's own were not finite."""
    first = min((own.backward for own in found), default=0)
    return tuple(sorted(rank for own in found if own.backward == first for rank in own.ranks))


def _complete(
    merged: Mapping[str, _FamilyStep], expected_shares: ExpectedShares, optimizers: Collection[str]
) -> frozenset[str]:
    """Return the families of which every shard that some optimizers step was there."""
    return frozenset(
        name
        for name, own in merged.items()
        if expected_shares.complete(own.whole, optimizers, name)
    )
