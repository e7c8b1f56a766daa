"""The rows of one family in one step as they come in: of equal replicas one, all shards."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan

from mp_agent.node.merge.coverage import AssumedShares, GroupKey, assumed_name, group_key
from mp_agent.records.columns import ColumnFamily
from mp_agent.records.reports.rows import NodeRow, NodeShare

Columns = tuple[float, ...]
"""A row, in the order of the family's columns."""

PlainRows = Mapping[Columns, Sequence[int]]
"""Rows of one group, each with the ranks that have it."""

Rows = Mapping[GroupKey, Iterable[Columns]]
"""The rows to unite, by group."""


@dataclass(slots=True)
class _ReplicaRows:
    """What is there of one replica of a group."""

    shards: set[int] = field(default_factory=set)
    rows: list[Columns] = field(default_factory=list)


@dataclass(slots=True)
class RowGroup:
    """The replicas of a group that may still be the one to take."""

    shard_count: int
    complete: int | None = None
    """The lowest replica of which every shard is there."""
    replicas: dict[int, _ReplicaRows] = field(default_factory=dict)

    def add(self, row: NodeRow, columns: Columns) -> None:
        """Add a node's row, with its columns in this agent's order."""
        for number in row.replicas:
            if self.complete is not None and number >= self.complete:
                return
            replica = self.replicas.setdefault(number, _ReplicaRows())
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


class FamilyRows:
    """The rows of a family, node by node, in any order."""

    def __init__(self, family: ColumnFamily) -> None:
        self.family = family
        self._groups: dict[GroupKey, RowGroup] = {}
        self._assumed: dict[GroupKey, dict[Columns, list[int]]] = {}

    def add(self, row: NodeRow, share: NodeShare, names: Sequence[str]) -> None:
        """Add a node's row; names: of its columns, in its order."""
        key, columns = group_key(share), self._fitted(row.columns, names)
        if share.assumed:
            self._assumed.setdefault(key, {}).setdefault(columns, []).extend(row.ranks)
            return
        if key not in self._groups:
            self._groups[key] = RowGroup(share.shard_count)
        self._groups[key].add(row, columns)

    def any_replica(self) -> dict[str, float]:
        """Return the columns of one replica of every group that a wrapper explains, as one row."""
        rows = [row for group in self._groups.values() for row in group.chosen()]
        return self.family.merged(rows) if rows else {}

    @property
    def plain(self) -> Mapping[str, PlainRows]:
        """The rows of parameters that no wrapper explains, by the name of their group."""
        return {assumed_name(key): rows for key, rows in self._assumed.items()}

    def chosen(self, assumed: AssumedShares) -> dict[GroupKey, list[Columns]]:
        """Return the rows to unite, by group."""
        chosen = {key: group.chosen() for key, group in self._groups.items()}
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
        rows = [row for key, rows in chosen.items() if key[1] in optimizers for row in rows]
        return self.family.merged(rows) if rows else {}

    def _fitted(self, columns: Columns, names: Sequence[str]) -> Columns:
        """Return a row in the order of this agent's columns; NaN where they are not there."""
        found = dict(zip(names, columns, strict=True))
        values = (found.get(name, nan) for name in self.family.names)
        # One object stands for all that is absent: rows that are equal compare equal.
        return tuple(nan if isnan(value) else value for value in values)
