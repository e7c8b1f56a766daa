"""The layer tables of one group as they come in: one of equal replicas, its shards added up."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mp_agent.node.merge.node_layers import fold
from mp_agent.records.columns import Column
from mp_agent.records.reports.rows import LayerBlock, Layout
from mp_agent.records.steps import FloatArray


@dataclass(slots=True)
class Table:
    """Layers of one layout, folded over the shards of a replica that came in."""

    layout: Layout
    rank: int
    """The lowest that wrote of it."""
    values: FloatArray
    """[C, L]"""
    shards: set[int]


@dataclass(slots=True)
class _ReplicaLayers:
    columns: tuple[Column, ...]
    tables: dict[bytes, Table] = field(default_factory=dict)
    shards: set[int] = field(default_factory=set)
    """Those of all tables."""

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        self.shards.update(block.shards)
        table = self.tables.get(layout.digest)
        if table is None:
            ranks, shards = min(block.ranks), set(block.shards)
            self.tables[layout.digest] = Table(layout, ranks, values, shards)
        elif table.shards.isdisjoint(block.shards):
            table.values = fold([table.values, values], self.columns)
            table.rank = min(table.rank, *block.ranks)
            table.shards.update(block.shards)


@dataclass(slots=True)
class LayerGroup:
    """The replicas of a group that may still be the one to take."""

    columns: tuple[Column, ...]
    shard_count: int
    complete: int | None = None
    """The lowest replica of which every shard is there."""
    replicas: dict[int, _ReplicaLayers] = field(default_factory=dict)

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        """Take in a node's layers [C, L] of one layout."""
        number = block.replicas[0]
        if self.complete is not None and number > self.complete:
            return
        replica = self.replicas.setdefault(number, _ReplicaLayers(self.columns))
        replica.add(block, layout, values)
        if len(replica.shards) >= self.shard_count:
            self.complete = number
            self.replicas = {i: r for i, r in self.replicas.items() if i <= number}

    def chosen(self) -> list[Table]:
        """Return the lowest complete replica, else the one with most shards."""
        if self.complete is not None:
            return list(self.replicas[self.complete].tables.values())
        most = max(sorted(self.replicas.items()), key=lambda item: len(item[1].shards))
        return list(most[1].tables.values())


@dataclass(slots=True)
class AssumedLayers:
    """The layers of an assumed group: each rank's own, or the same on all.

    Which of the two is known only from the steps, so that both are kept.
    """

    columns: tuple[Column, ...]
    ranks: set[int] = field(default_factory=set)
    _first: dict[bytes, Table] = field(default_factory=dict)
    """What the lowest rank has, by layout."""
    _total: dict[bytes, Table] = field(default_factory=dict)
    """What all have together."""

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        """Take in the layers [C, L] that some ranks of a node have each."""
        if not self.ranks.isdisjoint(block.ranks):
            return
        self.ranks.update(block.ranks)
        table = Table(layout, min(block.ranks), values, {0})
        first = self._first.setdefault(layout.digest, table)
        if table.rank < first.rank:
            self._first[layout.digest] = table
        all_of_them = _times(values, len(block.ranks), self.columns)
        total = self._total.get(layout.digest)
        if total is None:
            self._total[layout.digest] = replace(table, values=all_of_them)
        else:
            total.values = fold([total.values, all_of_them], self.columns)
            total.rank = min(total.rank, table.rank)

    def chosen(self, *, independent: bool) -> list[Table]:
        """Return what all ranks have together if they are independent, else one rank's."""
        return list((self._total if independent else self._first).values())


def _times(values: FloatArray, count: int, columns: Sequence[Column]) -> FloatArray:
    """Return a table [C, L] as if `count` ranks had one each."""
    if count == 1:
        return values
    pairs = zip(columns, values, strict=True)
    return np.stack([column.algebra.repeated(own, count) for column, own in pairs])
