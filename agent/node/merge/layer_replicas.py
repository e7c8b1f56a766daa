"""The layer tables of one group as they come in: one of equal replicas, its shards added up."""

from dataclasses import dataclass, field, replace

from mp_agent.node.merge.coverage import AssumedShares
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
    """The layers of an assumed group: each rank's own, or copies.

    Which of the two is known only from the steps, so that every table is kept that differs.
    """

    columns: tuple[Column, ...]
    ranks: set[int] = field(default_factory=set)
    _tables: dict[bytes, list[tuple[Table, tuple[int, ...]]]] = field(default_factory=dict)
    """By layout, each table with the ranks that have it."""

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        """Take in the layers [C, L] that some ranks of a node have each."""
        if self.ranks.isdisjoint(block.ranks):
            self.ranks.update(block.ranks)
            table = Table(layout, min(block.ranks), values, {0})
            self._tables.setdefault(layout.digest, []).append((table, block.ranks))

    def chosen(self, assumed: AssumedShares, group: str) -> list[Table]:
        """Return what the ranks have together, copies counted once."""
        united = []
        for found in self._tables.values():
            tables = assumed.chosen(group, found)
            rows = [table.values for table in tables]
            rank = min(table.rank for table in tables)
            united.append(replace(tables[0], values=fold(rows, self.columns), rank=rank))
        return united
