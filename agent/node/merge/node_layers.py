"""Reduces the layer tables of a node's ranks, by the names that layers have on all of them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from mp_agent.node.merge.node_steps import fitted
from mp_agent.node.merge.schema_index import SchemaIndex, SchemaMapping, SharePlace
from mp_agent.records.columns import Column, ColumnFamily
from mp_agent.records.node_report import LayerBlock, Layout, NodeLayers
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray

Identity = tuple[str, str, str]
"""Name, home and optimizer of a layer: equal names elsewhere are other tensors."""


@dataclass(frozen=True, slots=True)
class LayerSource:
    """A table whose layers are to be named."""

    layout: Layout
    rank: int
    """The lowest that wrote of it; gives the layers their order."""
    home: str
    optimizer: str

    @property
    def key(self) -> tuple[bytes, int, str, str]:
        """What decides of the names."""
        return (self.layout.digest, self.rank, self.home, self.optimizer)


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """Where the layers of some tables land, in module order."""

    labels: tuple[str, ...]
    optimizers: tuple[str, ...]
    targets: tuple[npt.NDArray[np.intp], ...]
    """Index into `labels` of each layer, per table."""
    retired: frozenset[str]
    """Labels that earlier plans used and that stand for no layer any more."""


_NAMES_KEPT = 2**19


class LayerNames:
    """Remembers the layers of the run; a name that turned out to be several keeps its suffix."""

    def __init__(self) -> None:
        self._known: dict[str, set[Identity]] = {}
        self._last: tuple[tuple[object, ...], LayerPlan] | None = None

    def plan(self, sources: Sequence[LayerSource]) -> LayerPlan:
        """Return where the layers of the tables land."""
        key = tuple(source.key for source in sources)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._make_plan(sources))
        return self._last[1]

    def _make_plan(self, sources: Sequence[LayerSource]) -> LayerPlan:
        places: dict[Identity, tuple[int, int]] = {}
        tables: list[list[Identity]] = []
        for source in sources:
            own = [(name, source.home, source.optimizer) for name in source.layout.names]
            tables.append(own)
            for identity, position in zip(own, source.layout.positions, strict=True):
                place = (source.rank, position)
                places[identity] = min(place, places.get(identity, place))
        order = sorted(places, key=places.__getitem__)
        if len(self._known) > _NAMES_KEPT:
            self._known.clear()
        for identity in order:
            self._known.setdefault(identity[0], set()).add(identity)
        index = {identity: number for number, identity in enumerate(order)}
        labels = tuple(map(self._label, order))
        return LayerPlan(
            labels=labels,
            optimizers=tuple(optimizer for _, _, optimizer in order),
            targets=tuple(np.array([index[i] for i in own], dtype=np.intp) for own in tables),
            retired=frozenset(self._ambiguous()) - set(labels),
        )

    def _label(self, identity: Identity) -> str:
        """Return a layer's label: its name, and where that is not enough, home and optimizer."""
        name, home, optimizer = identity
        alike = self._known[name]
        label = name
        if len({home for _, home, _ in alike}) > 1 and home:
            label += f"@{home}"
        if len({other for _, own, other in alike if own == home}) > 1 and optimizer:
            label += f"@optimizer{optimizer}"
        return label

    def _ambiguous(self) -> Iterable[str]:
        return (name for name, alike in self._known.items() if len(alike) > 1)


@dataclass(frozen=True, slots=True, eq=False)
class RankLayers:
    """One rank's layer table of a step, with the schema it was written under."""

    rank: int
    schema: Schema
    families: Mapping[str, FloatArray]
    """Rows [L, C] by family."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The layers of one shard on one rank."""

    rank: int
    place: SharePlace
    table: FloatArray
    """[C, layers of the share]"""


def reduce_layers(
    sequence: int, tables: Sequence[RankLayers], schema_index: SchemaIndex
) -> NodeLayers:
    """Return what the tables of a node's ranks say together.

    Shards are added up per replica. Where the node has every shard of a replica, no other replica
    is reported; of an assumed share, and of what is only compared, equal tables are reported once.
    """
    tables = sorted(tables, key=lambda table: table.rank)
    blocks = tuple(
        block
        for number in range(len(schema_index.families))
        for block in _blocks(number, tables, schema_index)
    )
    return NodeLayers(sequence=sequence, blocks=blocks)


def _blocks(
    number: int, tables: Sequence[RankLayers], schema_index: SchemaIndex
) -> Iterator[LayerBlock]:
    """Yield the blocks of one family."""
    family = schema_index.families[number]
    parts: dict[tuple[int, int], list[_Part]] = {}
    assumed: dict[tuple[int, int, int, bytes], list[_Part]] = {}
    for table in tables:
        for part in _parts(table, family, schema_index.plan(table.schema)):
            place = part.place
            if place.assumed or family.compared_only:
                key = (place.share, place.layout, place.shard, part.table.tobytes())
                assumed.setdefault(key, []).append(part)
            else:
                parts.setdefault((place.share, place.replica), []).append(part)
    for alike in assumed.values():
        ranks = [part.rank for part in alike]
        held = {part.place.replica for part in alike}
        yield _block(number, family, alike[:1], ranks, held)
    for share in dict.fromkeys(share for share, _ in parts):
        replicas = {replica: found for (own, replica), found in parts.items() if own == share}
        for chosen in _needed(replicas, schema_index.shares[share].shard_count):
            yield from _replica_blocks(number, family, chosen)


def fold(rows: Sequence[FloatArray], columns: Sequence[Column]) -> FloatArray:
    """Return tables [C, L] folded into one by their columns' algebra."""
    if len(rows) == 1:
        return rows[0]
    stacked = np.stack(rows)
    folded = np.empty_like(rows[0])
    for index, column in enumerate(columns):
        folded[index] = column.algebra.folded(stacked[:, index])
    return folded


def _parts(table: RankLayers, family: ColumnFamily, plan: SchemaMapping) -> Iterator[_Part]:
    found = table.families.get(family.name)
    if found is None or family.name not in plan.families:
        return
    rows = fitted(found, plan.families[family.name])
    for place in compress(plan.places, plan.has_rows[family.name]):
        yield _Part(table.rank, place, rows[place.layers].T)


def _needed(replicas: dict[int, list[_Part]], shard_count: int) -> list[list[_Part]]:
    """Return the lowest replica that is complete, else all."""
    for _, parts in sorted(replicas.items()):
        if len({part.place.shard for part in parts}) >= shard_count:
            return [parts]
    return [parts for _, parts in sorted(replicas.items())]


def _replica_blocks(
    number: int, family: ColumnFamily, parts: Sequence[_Part]
) -> Iterator[LayerBlock]:
    """Yield one block per layout; ranks of one replica need not all hold the same layers."""
    by_layout: dict[int, dict[int, _Part]] = {}
    for part in parts:
        by_layout.setdefault(part.place.layout, {}).setdefault(part.place.shard, part)
    for shards in by_layout.values():
        ordered = [shards[shard] for shard in sorted(shards)]
        yield _block(
            number, family, ordered, [part.rank for part in ordered], {ordered[0].place.replica}
        )


def _block(
    number: int,
    family: ColumnFamily,
    parts: Sequence[_Part],
    ranks: Sequence[int],
    replicas: Collection[int],
) -> LayerBlock:
    place = parts[0].place
    table = fold([part.table for part in parts], family.columns)
    return LayerBlock(
        family=number,
        share=place.share,
        layout=place.layout,
        shards=tuple(part.place.shard for part in parts),
        replicas=tuple(sorted(replicas)),
        ranks=tuple(ranks),
        values=np.ascontiguousarray(table, dtype="<f8").tobytes(),
    )
