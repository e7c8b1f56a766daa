"""Packs a rank's columns into one tensor that a collective sums exactly, and unpacks the result.

Sums of float64 that are exact in any order, by integers that a collective can add up.
A float64 is an integer times 2^-1074. Cut into parts of 32 bits it is 66 integers that can be added
up over 2^31 ranks without overflow; the sum of the parts is rounded once, as `math.fsum` does.

A rank's record as two small tensors, and what the ranks' tensors say together.
NaN, an absent value, is counted and never travels: it would be lost in a maximum and spoil a sum.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, isnan, nan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mp_agent.records.columns import GRADIENTS, STEP_COLUMNS, WEIGHTS, Column, shows_reduction
from mp_agent.records.columns.column import Algebra
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.schema import Schema, Share
from mp_agent.records.steps import StepRecord

PARTS = 66
"""Parts of 32 bits in the largest float64."""
_EXPONENT = 1074

IntArray = npt.NDArray[np.int64]


def parts_of(value: float) -> IntArray:
    """Return a finite float64 as parts [PARTS], the lowest first, all of its sign."""
    numerator, denominator = abs(value).as_integer_ratio()
    scaled = numerator * (1 << _EXPONENT) // denominator
    parts = np.frombuffer(scaled.to_bytes(4 * PARTS, "little"), dtype="<u4").astype(np.int64)
    return -parts if value < 0.0 else parts


def value_of(parts: IntArray) -> float:
    """Return the float64 next to the sum that `parts` [PARTS] stand for; Inf beyond float64."""
    total = 0
    for part in reversed(parts.tolist()):
        total = (total << 32) + part
    try:
        return total / (1 << _EXPONENT)
    except OverflowError:
        return inf if total > 0 else -inf


class TensorGroup(NamedTuple):
    """Tensors of which ranks hold shards and replicas, as in `Share`."""

    optimizer: str
    joint: bool
    group: str
    assumed: bool
    shard_count: int
    replica_count: int

    @classmethod
    def of(cls, share: Share) -> "TensorGroup":
        """Return the group that a rank's share is a part of."""
        return cls(
            share.optimizer,
            share.joint,
            share.group,
            share.assumed,
            share.shard_count,
            share.replica_count,
        )

    @property
    def is_of_run(self) -> bool:
        """Whether its gradients are the run's, or a part of them."""
        return self.joint or not self.optimizer


class GroupLayout(NamedTuple):
    """The groups of all ranks, in the same order on each."""

    groups: tuple[TensorGroup, ...]

    @classmethod
    def of(cls, groups_of_ranks: Iterable[Sequence[TensorGroup]]) -> "GroupLayout":
        """Return the layout of what each rank has."""
        found = {group for groups in groups_of_ranks for group in groups}
        return cls(tuple(sorted(found)))

    def holds(self, schema: Schema) -> bool:
        """Return whether every share of a rank's schema has its place."""
        return set(groups_of(schema)) <= set(self.groups)

    @property
    def positions(self) -> Mapping[TensorGroup, int]:
        """Position of each group."""
        return {group: position for position, group in enumerate(self.groups)}


def groups_of(schema: Schema) -> list[TensorGroup]:
    """Return the groups of a rank's shares of parameters, in the order of the shares."""
    return [TensorGroup.of(share) for share in schema.shares if not share.family]


class AssumedGroups:
    """What is known of them. Equal on all ranks, since it follows from reduced numbers alone.

    The node agents judge alike, and find copies that only some of the ranks hold besides.
    """

    def __init__(self) -> None:
        self._copies: set[TensorGroup] = set()
        self._differ: set[TensorGroup] = set()

    def learn(self, group: TensorGroup, *, copies: bool, equal: bool) -> None:
        """Add a step: whether anything showed copies, and whether all ranks had the same row."""
        if copies:
            self._copies.add(group)
        elif not equal:
            self._differ.add(group)

    def independent(self, group: TensorGroup) -> bool:
        """Return whether each rank has its own tensors: their rows add up."""
        return group in self._differ and group not in self._copies

    def replicated(self, group: TensorGroup) -> bool:
        """Return whether ranks are known to hold copies: the first rank's row counts."""
        return group in self._copies


_STEP_COLUMNS = tuple(column for column in STEP_COLUMNS if column.algebra is not Algebra.OWN)
_EVIDENCE = tuple(WEIGHTS.names.index(name) for name in ("bits", "varied"))
_VARIED = 1
"""Place of `varied` among those."""
_HEADER = 3
"""Integers in front of the sums: ranks that have a record, ranks that have a new schema, and ranks
that know the trainer's step."""
_SUM = 1 + PARTS
"""Integers of a sum: how many values it has, and its parts."""

FloatArray = npt.NDArray[np.float64]


class Packing:
    """The places of all values, for one layout.

    sums: int64 [N], to be added up over the ranks. extremes: float64 [M], of which each rank gets
    the largest; -Inf where a rank has no value, smallest values negated.
    """

    def __init__(self, layout: GroupLayout, assumed: AssumedGroups, *, is_first_rank: bool) -> None:
        self.layout = layout
        self._assumed = assumed
        self._is_first_rank = is_first_rank
        groups = len(layout.groups)
        columns = len(GRADIENTS.columns)
        places = len(_STEP_COLUMNS) + groups * columns
        self._weights_at = places
        """Where the places of the weights' bits begin, one pair per group."""
        places += groups * len(_EVIDENCE)
        self.sums_size = _HEADER + places * _SUM + groups
        self.extremes_size = 1 + 2 * places

    def packed(
        self, record: StepRecord | None, schema: Schema | None
    ) -> tuple[IntArray, FloatArray]:
        """Return a rank's sums and extremes; of a rank without a record nothing but that."""
        sums = np.zeros(self.sums_size, dtype=np.int64)
        extremes = np.full(self.extremes_size, -inf)
        if schema is not None and not self.layout.holds(schema):
            sums[1] = 1
        if record is None or schema is None:
            return sums, extremes
        sums[0] = 1
        if record.step != record.sequence:
            sums[2], extremes[0] = 1, record.step
        values = dict(zip(schema.step_columns, record.values.tolist(), strict=True))
        for place, column in enumerate(_STEP_COLUMNS):
            self._put(sums, extremes, place, values.get(column.name, nan))
        positions = self.layout.positions
        weights = record.families.get(WEIGHTS.name)
        for share, row in zip(
            schema.shares,
            weights.tolist() if weights is not None else [[]] * len(schema.shares),
            strict=True,
        ):
            position = positions.get(TensorGroup.of(share))
            if position is not None and share.assumed and row:
                for offset, place in enumerate(_EVIDENCE):
                    self._put(sums, extremes, self._evidence_at(position) + offset, row[place])
        rows = record.families.get(GRADIENTS.name)
        if rows is None:
            return sums, extremes
        for share, row in zip(schema.shares, rows.tolist(), strict=True):
            position = positions.get(TensorGroup.of(share))
            if position is not None and self._counts(share) and not all(map(isnan, row)):
                self._put_row(sums, extremes, position, row)
        return sums, extremes

    def _counts(self, share: Share) -> bool:
        """Return whether a share's row counts: of replicas the first one's does."""
        if share.assumed:
            return self._is_first_rank or not self._assumed.replicated(TensorGroup.of(share))
        return share.replica_index == 0

    def _put_row(
        self, sums: IntArray, extremes: FloatArray, position: int, row: Sequence[float]
    ) -> None:
        sums[self._rows_at + position] += 1
        first = len(_STEP_COLUMNS) + position * len(GRADIENTS.columns)
        for offset, value in enumerate(row):
            self._put(sums, extremes, first + offset, value)

    def _put(self, sums: IntArray, extremes: FloatArray, place: int, value: float) -> None:
        if not isfinite(value):
            return
        at = _HEADER + place * _SUM
        sums[at] += 1
        sums[at + 1 : at + _SUM] += parts_of(value)
        at = 1 + 2 * place
        extremes[at] = max(extremes[at], value)
        extremes[at + 1] = max(extremes[at + 1], -value)

    def _evidence_at(self, position: int) -> int:
        return self._weights_at + position * len(_EVIDENCE)

    @property
    def _rows_at(self) -> int:
        """Where the numbers of rows per group begin among the sums."""
        return self.sums_size - len(self.layout.groups)

    def is_outdated(self, sums: IntArray) -> bool:
        """Return whether any rank has groups that have no place."""
        return bool(sums[1])

    def unpacked(
        self, sequence: int, world_size: int, sums: IntArray, extremes: FloatArray
    ) -> GlobalStatistics:
        """Return what all ranks have together."""
        columns = {
            column.name: value
            for place, column in enumerate(_STEP_COLUMNS)
            if isfinite(value := self._merged(sums, extremes, place, column))
        }
        groups = [
            (group, rows, self._group(sums, extremes, position, rows))
            for position, group in enumerate(self.layout.groups)
            if group.is_of_run
            for rows in (int(sums[self._rows_at + position]),)
        ]
        there = [values for _, rows, values in groups if rows]
        left_out = columns.get("gradients_measured") == 0.0
        return GlobalStatistics(
            sequence=sequence,
            step=int(extremes[0]) if sums[2] else sequence,
            world_size=world_size,
            present_ranks=int(sums[0]),
            columns=columns,
            gradients=GRADIENTS.merged(there) if there and not left_out else {},
            complete=bool(groups)
            and not left_out
            and all(self._is_whole(group, rows, world_size) for group, rows, _ in groups),
        )

    def _group(
        self,
        sums: IntArray,
        extremes: FloatArray,
        position: int,
        rows: int,
    ) -> list[float]:
        """Return one row for a group; of rows that may be replicas one, if all are equal."""
        first = len(_STEP_COLUMNS) + position * len(GRADIENTS.columns)
        places = [(first + offset, column) for offset, column in enumerate(GRADIENTS.columns)]
        group = self.layout.groups[position]
        if group.assumed and rows > 1:
            highs = self._equal_row(sums, extremes, [place for place, _ in places], rows)
            shown = self._hold_copies(sums, extremes, position, highs, rows)
            known = self._assumed.replicated(group)
            self._assumed.learn(group, copies=shown, equal=highs is not None)
            if highs is not None and not self._assumed.independent(group):
                return highs
            if self._assumed.replicated(group) and not known:
                return [self._mean(sums, extremes, place, column) for place, column in places]
        return [self._merged(sums, extremes, place, column) for place, column in places]

    def _hold_copies(
        self,
        sums: IntArray,
        extremes: FloatArray,
        position: int,
        gradients: Sequence[float] | None,
        rows: int,
    ) -> bool:
        """Return whether all ranks have the same weights, not constant, or the same gradients."""
        start = self._evidence_at(position)
        weights = self._equal_row(sums, extremes, range(start, start + len(_EVIDENCE)), rows)
        looked_at = int(sums[_HEADER + start * _SUM]) > 0
        if weights is not None and weights[_VARIED] == 1.0:
            return True
        return (
            gradients is not None
            and (weights is not None or not looked_at)
            and shows_reduction(gradients)
        )

    def _mean(self, sums: IntArray, extremes: FloatArray, place: int, column: Column) -> float:
        """Return a column of copies that have different rows: of sums the mean over the ranks."""
        count, value = (
            int(sums[_HEADER + place * _SUM]),
            self._merged(sums, extremes, place, column),
        )
        return value / count if column.algebra is Algebra.SUM and count else value

    def _equal_row(
        self, sums: IntArray, extremes: FloatArray, places: Sequence[int], rows: int
    ) -> list[float] | None:
        """Return the row that all ranks have; None where any two differ."""
        row: list[float] = []
        for place in places:
            count, high = int(sums[_HEADER + place * _SUM]), float(extremes[1 + 2 * place])
            if count not in (0, rows) or (count and high != -float(extremes[2 + 2 * place])):
                return None
            row.append(high if count else nan)
        return row

    def _is_whole(self, group: TensorGroup, rows: int, world_size: int) -> bool:
        if not group.assumed:
            return rows == group.shard_count
        return rows == world_size or not self._assumed.independent(group)

    def _merged(self, sums: IntArray, extremes: FloatArray, place: int, column: Column) -> float:
        at = _HEADER + place * _SUM
        count = int(sums[at])
        if count == 0:
            return nan
        if column.algebra is Algebra.MAX:
            return float(extremes[1 + 2 * place])
        if column.algebra is Algebra.MIN:
            return -float(extremes[2 + 2 * place])
        total = value_of(sums[at + 1 : at + _SUM])
        return total / count if column.algebra is Algebra.MEAN else total
