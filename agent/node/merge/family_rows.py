"""The rows of one family in one step as they come in: equal replicas, and their shards."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import isnan, nan

import numpy as np

from mp_agent.node.merge.coverage import (
    AssumedShares,
    GroupKey,
    SeveralHomes,
    assumed_name,
    group_key,
)
from mp_agent.node.merge.schema_index import Indices as Places
from mp_agent.records.columns import (
    ColumnFamily,
)
from mp_agent.records.node_report import NodeRow, NodeShare
from mp_agent.records.steps import FloatArray, RowForm

Columns = tuple[float, ...]
"""A row, in the order of the family's columns."""

PlainRows = Mapping[Columns, Sequence[int]]
"""Rows of one group, each with the ranks that have it."""

AnyRows = Columns | FloatArray
"""A row by itself, or [N, C]: rows of several nodes."""

Rows = Mapping[GroupKey, Sequence[AnyRows]]
"""The rows to unite, by group."""


@dataclass(frozen=True, eq=False)
class AlikeRows:
    """Rows of one share, one of each of several nodes, without their numbers."""

    forms: Sequence[RowForm]

    @cached_property
    def shards_at_least(self) -> int:
        """The number of shards that every row is of, or more."""
        return min(len(row.shards) for row in self.forms)

    @cached_property
    def lowest(self) -> int:
        """The place of the row of the lowest replica."""
        return min(range(len(self.forms)), key=lambda place: self.forms[place].replicas[0])

    @cached_property
    def shards(self) -> Places:
        """The shards of all rows, row after row."""
        return np.fromiter(chain.from_iterable(row.shards for row in self.forms), dtype=np.intp)

    @cached_property
    def only_replica(self) -> int | None:
        """The replica of which all rows are different shards; None if they are not."""
        replicas = {row.replicas for row in self.forms}
        if len(replicas) > 1 or len(self.forms[0].replicas) > 1:
            return None
        return self.forms[0].replicas[0] if np.bincount(self.shards).max() == 1 else None

    @cached_property
    def compared(self) -> bool:
        """Whether any row has digests."""
        return any(row.compared for row in self.forms)


@dataclass(slots=True)
class _ReplicaRows:
    """What is there of one replica of a group."""

    rows: list[AnyRows] = field(default_factory=list)
    count: int = 0
    """Shards that the rows are of."""
    _shards: set[int] = field(default_factory=set)
    _arrays: list[Places] = field(default_factory=list)
    """Further ones, which few need as a set."""

    def add(self, shards: Collection[int], rows: AnyRows) -> None:
        """Add rows of some shards unless one of those is there."""
        for more in self._arrays:
            self._shards.update(more.tolist())
        self._arrays.clear()
        if self._shards.isdisjoint(shards):
            self._shards.update(shards)
            self.rows.append(rows)
            self.count += len(shards)

    def begin(self, shards: Places, rows_NC: FloatArray) -> None:
        """Add the first rows, all of different shards."""
        self._arrays.append(shards)
        self.rows.append(rows_NC)
        self.count = len(shards)


@dataclass(slots=True)
class RowGroup:
    """The replicas of a group that may still be the one to take."""

    shard_count: int
    complete: int | None = None
    """The lowest replica of which every shard is there."""
    replicas: dict[int, _ReplicaRows] = field(default_factory=dict)

    def add(self, row: NodeRow | RowForm, columns: AnyRows) -> None:
        """Add a node's row, with its columns in this agent's order."""
        for number in row.replicas:
            if self.complete is not None and number >= self.complete:
                return
            replica = self.replicas.setdefault(number, _ReplicaRows())
            replica.add(row.shards, columns)
            self._note(number)

    def add_alike(self, rows: AlikeRows, columns_NC: FloatArray) -> None:
        """Add a row of each of several nodes; the usual ways of splitting need no look at each."""
        if rows.shards_at_least == self.shard_count:
            lowest = rows.lowest
            self.add(rows.forms[lowest], columns_NC[lowest : lowest + 1])
            return
        number = rows.only_replica
        if number is not None and self.complete is None and number not in self.replicas:
            self.replicas.setdefault(number, _ReplicaRows()).begin(rows.shards, columns_NC)
            self._note(number)
            return
        for place, row in enumerate(rows.forms):
            self.add(row, columns_NC[place : place + 1])

    def chosen(self) -> list[AnyRows]:
        """Return the rows of the lowest complete replica, else of the one with most shards."""
        if self.complete is not None:
            return self.replicas[self.complete].rows
        return max(sorted(self.replicas.items()), key=lambda item: item[1].count)[1].rows

    def _note(self, number: int) -> None:
        if self.replicas[number].count >= self.shard_count:
            self.complete = number
            self.replicas = {i: r for i, r in self.replicas.items() if i <= number}


class FamilyRows:
    """The rows of a family, node by node, in any order."""

    def __init__(self, family: ColumnFamily) -> None:
        self.family = family
        self._groups: dict[GroupKey, RowGroup] = {}
        self._assumed: dict[GroupKey, dict[Columns, list[int]]] = {}
        self._several_homes = SeveralHomes()

    def add(self, row: NodeRow, share: NodeShare, names: Sequence[str]) -> None:
        """Add a node's row; names: of its columns, in its order."""
        key, columns = group_key(share), self._fitted(row.columns, names)
        if share.assumed:
            self._assumed.setdefault(key, {}).setdefault(columns, []).extend(row.ranks)
            return
        if key not in self._groups:
            self._groups[key] = RowGroup(share.shard_count)
        self._groups[key].add(row, columns)
        self._several_homes.add(share, (row,))

    def add_alike(self, rows: AlikeRows, share: NodeShare, columns_NC: FloatArray) -> None:
        """Add a row of each of several nodes, with their columns in this agent's order."""
        key = group_key(share)
        if share.assumed:
            found = self._assumed.setdefault(key, {})
            for row, columns in zip(rows.forms, columns_NC.tolist(), strict=True):
                found.setdefault(_absent_alike(columns), []).extend(row.ranks)
            return
        if key not in self._groups:
            self._groups[key] = RowGroup(share.shard_count)
        self._groups[key].add_alike(rows, columns_NC)
        self._several_homes.add(share, rows.forms)

    def any_replica(self) -> dict[str, float]:
        """Return the columns of one replica of every group that a wrapper explains, as one row."""
        return self._merged([row for group in self._groups.values() for row in group.chosen()])

    @property
    def plain(self) -> Mapping[str, PlainRows]:
        """The rows of parameters that no wrapper explains, by the name of their group."""
        return {assumed_name(key): rows for key, rows in self._assumed.items()}

    def of_homes(self, assumed: AssumedShares) -> Mapping[str, PlainRows]:
        """Return the whole rows of what several homes hold, each with the rank of its home."""
        found: dict[str, dict[Columns, list[int]]] = {}
        for tensor, ranks in self._several_homes.ranks(assumed):
            rows = found.setdefault(tensor, {})
            for key, rank in ranks.items():
                if self._groups[key].complete is not None:
                    values = self._merged(self._groups[key].chosen())
                    row = tuple(values.get(name, nan) for name in self.family.names)
                    rows.setdefault(row, []).append(rank)
        return found

    def groups_of(self, tensors: Collection[str], assumed: AssumedShares) -> set[GroupKey]:
        """Return the groups of some of what several homes, or ranks without a wrapper, hold."""
        held = self._several_homes.ranks(assumed)
        plain = {key for key in self._assumed if assumed_name(key) in tensors}
        return plain | {key for tensor, ranks in held if tensor in tensors for key in ranks}

    def chosen(self, assumed: AssumedShares) -> Rows:
        """Return the rows to unite, by group."""
        repeated = self._several_homes.repeated(assumed)
        chosen: dict[GroupKey, Sequence[AnyRows]] = {
            key: group.chosen() for key, group in self._groups.items() if key not in repeated
        }
        for key, rows in self._assumed.items():
            chosen[key] = assumed.chosen(assumed_name(key), list(rows.items()))
        return chosen

    def whole(self, assumed: AssumedShares, world_size: int) -> set[GroupKey]:
        """Return the groups of which nothing is missing."""
        whole = {key for key, group in self._groups.items() if group.complete is not None}
        for key, rows in self._assumed.items():
            present = [rank for ranks in rows.values() for rank in ranks]
            if assumed.whole(assumed_name(key), present, world_size):
                whole.add(key)
        return whole

    def values(self, chosen: Rows, optimizers: Collection[str]) -> dict[str, float]:
        """Return the merged columns of some optimizers; without those that no row has."""
        return self._merged(
            [row for key, rows in chosen.items() if key[1] in optimizers for row in rows]
        )

    def _merged(self, rows: Sequence[AnyRows]) -> dict[str, float]:
        arrays = [row for row in rows if isinstance(row, np.ndarray)]
        plain = [row for row in rows if isinstance(row, tuple)]
        if not arrays:
            return self.family.merged(plain) if plain else {}
        return self.family.merged_array(np.concatenate([*arrays, *map(np.atleast_2d, plain)]))

    def _fitted(self, columns: Columns, names: Sequence[str]) -> Columns:
        """Return a row in the order of this agent's columns; NaN where they are not there."""
        found = dict(zip(names, columns, strict=True))
        return _absent_alike(found.get(name, nan) for name in self.family.names)


def _absent_alike(values: Iterable[float]) -> Columns:
    """Return a row in which one object stands for all that is absent: equal rows compare equal."""
    return tuple(nan if isnan(value) else value for value in values)
