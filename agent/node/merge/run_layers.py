"""The layer tables of one group as they come in: of equal replicas one, its shards added up."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mp_agent.node.merge.coverage import (
    AssumedShares,
    ExpectedShares,
    GroupKey,
    LayerCopies,
    SeveralHomes,
    assumed_name,
    group_key,
)
from mp_agent.node.merge.node_layers import LayerNames, LayerPlan, LayerSource, fold
from mp_agent.records.columns import FAMILIES, Column, ColumnFamily, by_name
from mp_agent.records.node_report import LayerBlock, Layout, NodeLayers, NodeShare
from mp_agent.records.schema import FamilyColumns
from mp_agent.records.steps import FloatArray
from mp_agent.records.views import LayerView


@dataclass(slots=True)
class FoldedLayers:
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
    tables: dict[bytes, FoldedLayers] = field(default_factory=dict)
    shards: set[int] = field(default_factory=set)
    """Shards of all tables."""

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        self.shards.update(block.shards)
        table = self.tables.get(layout.digest)
        if table is None:
            ranks, shards = min(block.ranks), set(block.shards)
            self.tables[layout.digest] = FoldedLayers(layout, ranks, values, shards)
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

    def chosen(self) -> list[FoldedLayers]:
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
    _tables: dict[bytes, list[tuple[FoldedLayers, tuple[int, ...]]]] = field(default_factory=dict)
    """Tables with the ranks that have them, by layout."""

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        """Take in the layers [C, L] that some ranks of a node have each."""
        if self.ranks.isdisjoint(block.ranks):
            self.ranks.update(block.ranks)
            table = FoldedLayers(layout, min(block.ranks), values, {0})
            self._tables.setdefault(layout.digest, []).append((table, block.ranks))

    def chosen(self, assumed: AssumedShares, group: str) -> list[FoldedLayers]:
        """Return what the ranks have together, copies counted once."""
        united = []
        for found in self._tables.values():
            tables = assumed.chosen(group, found)
            rows = [table.values for table in tables]
            rank = min(table.rank for table in tables)
            united.append(replace(tables[0], values=fold(rows, self.columns), rank=rank))
        return united


@dataclass(frozen=True, slots=True, eq=False)
class MergedLayers:
    """The layers of the run at one sampled step, in module order, as one family has them.

    values: [L, C] finite, NaN where absent or beyond float64. sound: [L] whether all that a norm
    that counts comes with is there.
    """

    family: ColumnFamily
    names: tuple[str, ...]
    values: FloatArray
    sound: npt.NDArray[np.bool_]
    complete: bool
    """Whether every shard of every tensor was present."""
    optimizers: tuple[str, ...] = ()
    """Which optimizer steps each layer; none: the first one all of them."""
    retired: frozenset[str] = frozenset()
    """Names that stand for no layer any more: several layers turned out to be called so."""

    def judged_of(self, judged: Collection[str]) -> "MergedLayers":
        """Return the table with only the norms that count whose optimizer's step is `judged`."""
        if not self.optimizers:
            return self
        counts = np.array([optimizer in judged for optimizer in self.optimizers], dtype=np.bool_)
        return replace(self, sound=self.sound & counts)

    def views(self, *, step_judged: bool, step: int = 0) -> tuple[LayerView, ...]:
        """Return one view per layer; norms count only where those of the step do."""
        columns, family = self.family.names, self.family.name
        judged = (self.sound & (step_judged and self.complete)).tolist()
        return tuple(
            LayerView(
                name=name, values=by_name(columns, row), judged=counts, family=family, step=step
            )
            for name, row, counts in zip(self.names, self.values.tolist(), judged, strict=True)
        )

    def nonfinite_nearest_output(self) -> str:
        """Return the last layer, in module order, with a NaN or Inf element; "" if there is none.

        Backward runs from the output, so that is where a value born in backward began.
        """
        indices = [self.family.names.index(name) for name in self.family.nonfinite]
        found = np.flatnonzero(np.nansum(self.values[:, indices], axis=1))
        return self.names[found[-1]] if found.size else ""


@dataclass(frozen=True, slots=True)
class ReportLayerColumns:
    """What the blocks of a node refer to."""

    families: Sequence[FamilyColumns]
    shares: Sequence[NodeShare]
    layouts: Sequence[Layout]

    def table(self, block: LayerBlock, family: ColumnFamily) -> FloatArray:
        """Return a block's values [C, L] in the order of this agent's columns, NaN if absent."""
        sent = self.families[block.family].columns
        values = np.frombuffer(block.values, dtype="<f8")
        table = values.reshape(len(sent), -1)
        if sent == family.names:
            return table
        fitted = np.full((len(family.columns), table.shape[1]), np.nan)
        for index, name in enumerate(family.names):
            if name in sent:
                fitted[index] = table[sent.index(name)]
        return fitted


@dataclass(slots=True)
class _FamilyTables:
    """The tables of one family, by group."""

    family: ColumnFamily
    groups: dict[GroupKey, LayerGroup] = field(default_factory=dict)
    assumed: dict[GroupKey, AssumedLayers] = field(default_factory=dict)
    several_homes: SeveralHomes = field(default_factory=SeveralHomes)

    def add(self, block: LayerBlock, share: NodeShare, layout: Layout, values: FloatArray) -> None:
        key, columns = group_key(share), self.family.columns
        if share.assumed:
            if key not in self.assumed:
                self.assumed[key] = AssumedLayers(columns)
            self.assumed[key].add(block, layout, values)
        else:
            if key not in self.groups:
                self.groups[key] = LayerGroup(columns, share.shard_count)
            self.groups[key].add(block, layout, values)
            self.several_homes.add(share, (block,))

    def chosen(self, assumed: AssumedShares) -> list[tuple[int, GroupKey, FoldedLayers]]:
        """Return the tables to unite as (lowest rank, group, table), in a fixed order."""
        repeated = self.several_homes.repeated(assumed)
        chosen = {key: group.chosen() for key, group in self.groups.items() if key not in repeated}
        for key, layers in self.assumed.items():
            chosen[key] = layers.chosen(assumed, assumed_name(key))
        return sorted(
            ((table.rank, key, table) for key, found in chosen.items() for table in found),
            key=lambda item: (*item[:2], item[2].layout.digest),
        )

    def whole(self, assumed: AssumedShares, world_size: int) -> set[GroupKey]:
        """Return the groups of which nothing is missing."""
        whole = {key for key, group in self.groups.items() if group.complete is not None}
        return whole | {
            key
            for key, layers in self.assumed.items()
            if assumed.whole(assumed_name(key), layers.ranks, world_size)
        }


class LayerMerge:
    """The layers of one sampled step as they come in, node by node, in any order."""

    def __init__(self, world_size: int, families: Iterable[ColumnFamily] = FAMILIES) -> None:
        self._world_size = world_size
        merged = [family for family in families if not family.compared_only]
        self._families = {family.name: _FamilyTables(family) for family in merged}
        self._compared = {family.name: family for family in families if family.compared_only}
        self._homes: dict[GroupKey, str] = {}
        self.copies = LayerCopies()
        """What is compared of the layers, and not merged."""

    def add(self, table: NodeLayers, terms: ReportLayerColumns) -> None:
        """Add a node's blocks; those of a family that this agent does not know are ignored."""
        for block in table.blocks:
            share, layout = terms.shares[block.share], terms.layouts[block.layout]
            name = terms.families[block.family].name
            tables = self._families.get(name)
            if (family := self._compared.get(name)) is not None:
                self.copies.add(family, block, share, layout, terms.table(block, family))
            if tables is not None:
                self._homes[group_key(share)] = share.home
                tables.add(block, share, layout, terms.table(block, tables.family))

    def merged(
        self, expected_shares: ExpectedShares, assumed: AssumedShares, names: LayerNames
    ) -> dict[str, MergedLayers]:
        """Return the tables by family: of equal replicas one is taken, shards are united.

        Layers of equal name and home in different groups become one row: that of their union. A
        layer is called the same in all families.
        """
        chosen = {name: own.chosen(assumed) for name, own in self._families.items()}
        tables = [table for found in chosen.values() for table in found]
        plan = names.plan(
            [
                LayerSource(table.layout, rank, self._homes[key], key[1])
                for rank, key, table in tables
            ]
        )
        optimizers = {
            name: {"", *(key[1] for _, key, _ in found)} for name, found in chosen.items()
        }
        complete = {
            name: all(
                expected_shares.complete(own.whole(assumed, self._world_size), (optimizer,), name)
                for optimizer in optimizers[name]
            )
            for name, own in self._families.items()
        }
        merged, start = {}, 0
        for name, found in chosen.items():
            targets = plan.targets[start : start + len(found)]
            start += len(found)
            if found:
                values = [table.values for *_, table in found]
                family = self._families[name].family
                merged[name] = _united(family, values, targets, plan, complete=complete[name])
        return merged


def _united(
    family: ColumnFamily,
    tables: Sequence[FloatArray],
    targets: Sequence[npt.NDArray[np.intp]],
    plan: LayerPlan,
    *,
    complete: bool,
) -> MergedLayers:
    """Return tables [C, L] of a family as one, of the layers that any of them has."""
    rows, into = np.concatenate(tables, axis=1), np.concatenate(targets)
    there = np.zeros(len(plan.labels), dtype=np.bool_)
    there[into] = True
    own = np.flatnonzero(there)
    values = _spread(family, rows, np.searchsorted(own, into), len(own))
    finite = np.isfinite(values)
    required = [family.names.index(name) for name in family.required]
    all_there = len(own) == len(plan.labels)
    return MergedLayers(
        family=family,
        names=plan.labels if all_there else tuple(plan.labels[place] for place in own),
        values=np.where(finite, values, np.nan).T,
        sound=np.logical_and.reduce(finite[required], axis=0),
        complete=complete,
        optimizers=plan.optimizers if all_there else tuple(plan.optimizers[place] for place in own),
        retired=plan.retired,
    )


def _spread(
    family: ColumnFamily, rows: FloatArray, into: npt.NDArray[np.intp], layers: int
) -> FloatArray:
    """Return [C, layers]: rows [C, L] folded into their target layers."""
    merged = np.empty((len(family.columns), layers))
    for index, column in enumerate(family.columns):
        merged[index] = column.algebra.folded_into(rows[index], into, layers)
    return merged
