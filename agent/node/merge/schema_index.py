"""What the rows of a node refer to: columns, shares, holdings and layouts, by their index."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mp_agent.inputs.files import as_utf8
from mp_agent.records.columns import FAMILIES, STEP_COLUMNS, ColumnFamily, step_columns
from mp_agent.records.columns.column import Algebra
from mp_agent.records.node_report import Layout, NodeShare, layout_digest
from mp_agent.records.schema import DATA_RANKS_FACT, Schema, Share

_SCHEMAS_KEPT = 4096

_MERGED = tuple(column.name for column in STEP_COLUMNS if column.algebra is not Algebra.OWN)
_UNGUARDED = step_columns(guarded=False)

Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class SharePlace:
    """One share of a rank: what it is of, the rank's place in it, and its layers."""

    share: int
    """Index into `SchemaIndex.shares`."""
    shard: int
    replica: int
    assumed: bool
    family: str
    """The family that alone has rows of it; empty for shares of parameters."""
    layout: int
    """Index into `SchemaIndex.layouts`."""
    layers: Indices
    """Rows of the rank's layer table."""


@dataclass(frozen=True, slots=True, eq=False)
class SchemaMapping:
    """How the rows of one schema enter the reduction of a node."""

    schema: Schema
    places: tuple[SharePlace, ...]
    step_columns: tuple[int, ...]
    """Position in a record of each step column that the index can have; -1 where the schema lacks
    it."""
    own_columns: Mapping[str, int]
    """Position of every column in a record."""
    families: Mapping[str, Indices | None]
    """Of each family that the schema has, the position of each of the index's columns in a row, the
    row's length where the schema lacks it; None where the columns are the index's own."""
    has_rows: Mapping[str, npt.NDArray[np.bool_]]
    """Of each of those families, whether it has rows of a place."""
    held: frozenset[int]
    weights: str
    """Names what the rank holds of the model; "" where no other rank can hold the same."""
    data_ranks: str
    """Names the ranks that train on data of their own, this one among them; "" if unknown."""


@dataclass(slots=True)
class SchemaIndex:
    """Grows with every schema that the node's ranks come up with; nothing in it is renumbered."""

    families: tuple[ColumnFamily, ...] = FAMILIES
    step_columns: tuple[str, ...] = tuple(name for name in _MERGED if name in _UNGUARDED)
    """Those of a guard are added with the first schema that has them."""
    shares: list[NodeShare] = field(default_factory=list)
    holdings: list[tuple[int, ...]] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    _shares: dict[NodeShare, int] = field(default_factory=dict)
    _holdings: dict[tuple[int, ...], int] = field(default_factory=dict)
    _layouts: dict[bytes, int] = field(default_factory=dict)
    _plans: dict[int, SchemaMapping] = field(default_factory=dict)
    _joined: dict[tuple[int, ...], int] = field(default_factory=dict)

    def plan(self, schema: Schema) -> SchemaMapping:
        """Return how the rows of `schema` are read."""
        plan = self._plans.get(id(schema))
        if plan is None or plan.schema is not schema:
            if len(self._plans) >= _SCHEMAS_KEPT:
                self._plans.clear()
                self._joined.clear()
            plan = self._plans[id(schema)] = self._make_plan(schema)
        return plan

    def holding(self, schemas: Iterable[Schema]) -> int:
        """Return the index of all shares that the schemas have together."""
        plans = [self.plan(schema) for schema in schemas]
        key = tuple(map(id, plans))
        if key not in self._joined:
            shares: frozenset[int] = frozenset().union(*(plan.held for plan in plans))
            held = tuple(sorted(shares))
            if held not in self._holdings:
                self._holdings[held] = len(self.holdings)
                self.holdings.append(held)
            self._joined[key] = self._holdings[held]
        return self._joined[key]

    def _make_plan(self, schema: Schema) -> SchemaMapping:
        step = schema.step_columns
        places = tuple(self._place(schema, index) for index in range(len(schema.shares)))
        if not set(_MERGED[len(self.step_columns) :]).isdisjoint(step):
            self.step_columns = _MERGED
        return SchemaMapping(
            schema=schema,
            places=places,
            step_columns=tuple(step.index(name) if name in step else -1 for name in _MERGED),
            own_columns={name: index for index, name in enumerate(step)},
            families={
                family.name: _places(found, family.names)
                for family in self.families
                if (found := schema.columns(family.name))
            },
            has_rows={
                family.name: _has_rows(family.name, places)
                for family in self.families
                if schema.columns(family.name)
            },
            held=frozenset(place.share for place in places),
            weights=_weights_name([share for share in schema.shares if not share.family]),
            data_ranks=as_utf8(schema.fact(DATA_RANKS_FACT)),
        )

    def _place(self, schema: Schema, index: int) -> SharePlace:
        share = schema.shares[index]
        layers = [row for row, layer in enumerate(schema.layers) if layer.share == index]
        names = tuple(as_utf8(schema.layers[row].name) for row in layers)
        return SharePlace(
            share=self._share_index(share),
            shard=0 if share.assumed else share.shard_index,
            replica=0 if share.assumed else share.replica_index,
            assumed=share.assumed,
            family=share.family,
            layout=self._layout_index(names, tuple(layers)),
            layers=np.array(layers, dtype=np.intp),
        )

    def _share_index(self, share: Share) -> int:
        known = NodeShare(
            group=as_utf8(share.group),
            optimizer=as_utf8(share.optimizer),
            home=as_utf8(share.home),
            shard_count=share.shard_count,
            replica_count=share.replica_count,
            assumed=share.assumed,
            joint=share.joint,
            family=as_utf8(share.family),
        )
        if known not in self._shares:
            self._shares[known] = len(self.shares)
            self.shares.append(known)
        return self._shares[known]

    def _layout_index(self, names: tuple[str, ...], positions: tuple[int, ...]) -> int:
        digest = layout_digest(names, positions)
        if digest not in self._layouts:
            self._layouts[digest] = len(self.layouts)
            self.layouts.append(Layout(digest=digest, names=names, positions=positions))
        return self._layouts[digest]


def _has_rows(family: str, places: Sequence[SharePlace]) -> npt.NDArray[np.bool_]:
    """Return of which places a family has rows: its own, else those of parameters."""
    wanted = family if any(place.family == family for place in places) else ""
    return np.array([place.family == wanted for place in places], dtype=np.bool_)


def _places(found: tuple[str, ...], wanted: tuple[str, ...]) -> Indices | None:
    if found == wanted:
        return None
    places = [found.index(name) if name in found else len(found) for name in wanted]
    return np.array(places, dtype=np.intp)


def _weights_name(shares: Iterable[Share]) -> str:
    """Return a name that ranks share when they hold the same shards of the same tensors."""
    if not any(share.replica_count > 1 or share.assumed for share in shares):
        return ""
    held = sorted((share.group, share.optimizer, share.shard_index) for share in shares)
    return hashlib.blake2b(repr(held).encode("utf-8", "replace"), digest_size=8).hexdigest()
