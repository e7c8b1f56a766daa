"""The layer tables of several nodes become one table of the run."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mp_agent.node.book import ALGEBRA
from mp_agent.node.layer_names import LayerNames, Source
from mp_agent.node.reduce_layers import fold
from mp_agent.node.shares import AssumedShares, GroupKey, Roster, assumed_name, group_key
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, Algebra
from mp_agent.records.merged import LayerView
from mp_agent.records.rows import LayerBlock, Layout, NodeLayers, NodeShare
from mp_agent.records.steps import FloatArray

_FOLD = {
    Algebra.SUM: (np.add, 0.0),
    Algebra.MAX: (np.fmax, np.nan),
    Algebra.MIN: (np.fmin, np.nan),
}


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """What the blocks of a node refer to."""

    gradient_columns: tuple[str, ...]
    shares: Sequence[NodeShare]
    layouts: Sequence[Layout]

    def table(self, block: LayerBlock) -> FloatArray:
        """Return a block's values [C, L] in the order of this agent's columns, NaN if absent."""
        values = np.frombuffer(block.values, dtype="<f8")
        table = values.reshape(len(self.gradient_columns), -1)
        if self.gradient_columns == GRADIENT_COLUMN_NAMES:
            return table
        fitted = np.full((len(GRADIENT_COLUMN_NAMES), table.shape[1]), np.nan)
        for index, name in enumerate(self.gradient_columns):
            if name in GRADIENT_COLUMN_NAMES:
                fitted[GRADIENT_COLUMN_NAMES.index(name)] = table[index]
        return fitted


@dataclass(frozen=True, slots=True, eq=False)
class MergedLayers:
    """The layers of the run at one sampled step, in module order.

    values: [L, C] finite. sound: [L] whether all of the layer's numbers could be represented.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    values: FloatArray
    sound: npt.NDArray[np.bool_]
    complete: bool
    """Whether every shard of every tensor was present."""
    optimizers: tuple[str, ...] = ()
    """Which optimizer steps each layer; none: the one that sets the step count, all of them."""
    retired: frozenset[str] = frozenset()
    """Names that stand for no layer any more: several layers turned out to be called so."""

    def judged_of(self, judged: Collection[str]) -> "MergedLayers":
        """Return the table with only the norms that count whose optimizer's step is `judged`."""
        if not self.optimizers:
            return self
        counts = np.array([optimizer in judged for optimizer in self.optimizers], dtype=np.bool_)
        return replace(self, sound=self.sound & counts)

    def views(self, *, step_judged: bool) -> tuple[LayerView, ...]:
        """Return one view per layer; norms count only where those of the step do."""
        judged = (self.sound & (step_judged and self.complete)).tolist()
        return tuple(
            LayerView(name=name, values=dict(zip(self.columns, row, strict=True)), judged=counts)
            for name, row, counts in zip(self.names, self.values.tolist(), judged, strict=True)
        )

    def nonfinite_nearest_output(self) -> str:
        """Return the last layer, in module order, with a NaN or Inf element; "" if there is none.

        Backward runs from the output, so that is where a value born in backward began.
        """
        indices = [self.columns.index(name) for name in ("nan_elements", "inf_elements")]
        found = np.flatnonzero(self.values[:, indices].sum(axis=1))
        return self.names[found[-1]] if found.size else ""


@dataclass(slots=True)
class _Table:
    """Layers of one layout, folded over the shards of a replica that came in."""

    layout: Layout
    rank: int
    """The lowest that wrote of it."""
    values: FloatArray
    """[C, L]"""
    shards: set[int]


@dataclass(slots=True)
class _Replica:
    tables: dict[bytes, _Table] = field(default_factory=dict)
    shards: set[int] = field(default_factory=set)
    """Those of all tables."""

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        self.shards.update(block.shards)
        table = self.tables.get(layout.digest)
        if table is None:
            ranks, shards = min(block.ranks), set(block.shards)
            self.tables[layout.digest] = _Table(layout, ranks, values, shards)
        elif table.shards.isdisjoint(block.shards):
            table.values = fold([table.values, values], GRADIENT_COLUMN_NAMES)
            table.rank = min(table.rank, *block.ranks)
            table.shards.update(block.shards)


@dataclass(slots=True)
class _Group:
    shard_count: int
    complete: int | None = None
    replicas: dict[int, _Replica] = field(default_factory=dict)

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        number = block.replicas[0]
        if self.complete is not None and number > self.complete:
            return
        replica = self.replicas.setdefault(number, _Replica())
        replica.add(block, layout, values)
        if len(replica.shards) >= self.shard_count:
            self.complete = number
            self.replicas = {i: r for i, r in self.replicas.items() if i <= number}

    def chosen(self) -> list[_Table]:
        if self.complete is not None:
            return list(self.replicas[self.complete].tables.values())
        most = max(sorted(self.replicas.items()), key=lambda item: len(item[1].shards))
        return list(most[1].tables.values())


@dataclass(slots=True)
class _Models:
    """An assumed group: models of every rank, or replicas of one; the steps' digests tell which."""

    ranks: set[int] = field(default_factory=set)
    first: dict[bytes, _Table] = field(default_factory=dict)
    """What the lowest rank has."""
    total: dict[bytes, _Table] = field(default_factory=dict)
    """What all have together."""

    def add(self, block: LayerBlock, layout: Layout, values: FloatArray) -> None:
        if not self.ranks.isdisjoint(block.ranks):
            return
        self.ranks.update(block.ranks)
        table = _Table(layout, min(block.ranks), values, {0})
        first = self.first.setdefault(layout.digest, table)
        if table.rank < first.rank:
            self.first[layout.digest] = table
        all_of_them = _times(values, len(block.ranks))
        total = self.total.get(layout.digest)
        if total is None:
            self.total[layout.digest] = replace(table, values=all_of_them)
        else:
            total.values = fold([total.values, all_of_them], GRADIENT_COLUMN_NAMES)
            total.rank = min(total.rank, table.rank)


class LayerMerge:
    """The layers of one sampled step as they come in, node by node, in any order."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._groups: dict[GroupKey, _Group] = {}
        self._assumed: dict[GroupKey, _Models] = {}
        self._homes: dict[GroupKey, str] = {}

    def add(self, table: NodeLayers, terms: LayerTerms) -> None:
        """Take a node's blocks in."""
        for block in table.blocks:
            share, layout = terms.shares[block.share], terms.layouts[block.layout]
            key, values = group_key(share), terms.table(block)
            self._homes[key] = share.home
            if share.assumed:
                self._assumed.setdefault(key, _Models()).add(block, layout, values)
            else:
                self._groups.setdefault(key, _Group(share.shard_count)).add(block, layout, values)

    def merged(self, roster: Roster, assumed: AssumedShares, names: LayerNames) -> MergedLayers:
        """Return the table: of equal replicas one is taken, shards add up.

        Layers of equal name and home in different groups become one row: the norm of their union.
        """
        chosen = {key: group.chosen() for key, group in self._groups.items()}
        whole = {key for key, group in self._groups.items() if group.complete is not None}
        for key, models in self._assumed.items():
            independent = assumed.independent(assumed_name(key))
            chosen[key] = list((models.total if independent else models.first).values())
            if not independent or len(models.ranks) == self._world_size:
                whole.add(key)
        tables = sorted(
            ((table.rank, key, table) for key, found in chosen.items() for table in found),
            key=lambda item: (*item[:2], item[2].layout.digest),
        )
        plan = names.plan(
            [Source(table.layout, rank, self._homes[key], key[1]) for rank, key, table in tables]
        )
        values = _spread([table.values for *_, table in tables], plan.targets, len(plan.labels))
        observed = ~np.isnan(values).all(axis=1)
        columns = np.flatnonzero(observed if observed.any() else ~observed)
        finite = np.isfinite(values[columns])
        return MergedLayers(
            names=plan.labels,
            columns=tuple(GRADIENT_COLUMN_NAMES[column] for column in columns),
            values=np.where(finite, values[columns], 0.0).T,
            sound=np.logical_and.reduce(finite, axis=0),
            complete=all(roster.complete(whole, optimizer) for optimizer in {"", *plan.optimizers}),
            optimizers=plan.optimizers,
            retired=plan.retired,
        )


def _times(values: FloatArray, count: int) -> FloatArray:
    """Return a table [C, L] as if `count` ranks had one each."""
    if count == 1:
        return values
    many = values.copy()
    for index, name in enumerate(GRADIENT_COLUMN_NAMES):
        if ALGEBRA[name] is Algebra.SUM:
            many[index] *= count
    return many


def _spread(
    tables: Sequence[FloatArray], targets: Sequence[npt.NDArray[np.intp]], layers: int
) -> FloatArray:
    """Return [C, layers]: the tables [C, L] folded into their target layers."""
    merged = np.empty((len(GRADIENT_COLUMN_NAMES), layers))
    if not tables:
        return merged
    rows, into = np.concatenate(tables, axis=1), np.concatenate(targets)
    for index, name in enumerate(GRADIENT_COLUMN_NAMES):
        function, identity = _FOLD[ALGEBRA[name]]
        merged[index] = identity
        observed = ~np.isnan(rows[index])
        function.at(merged[index], into[observed], rows[index][observed])
        unobserved = np.ones(layers, dtype=np.bool_)
        unobserved[into[observed]] = False
        merged[index][unobserved] = np.nan
    return merged
