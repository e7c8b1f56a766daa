"""Which layers differ between ranks that hold copies of them, at one step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mp_agent.node.merge.coverage import AssumedShares, group_key
from mp_agent.records.columns import STATE, ColumnFamily
from mp_agent.records.reports.rows import LayerBlock, Layout, NodeShare
from mp_agent.records.steps import FloatArray

Votes = dict[float, list[int]]
"""Digest → the ranks that have it."""

_BITS, _VARIED, _COPIED = (STATE.names.index(name) for name in ("bits", "varied", "copied"))


class _Table(NamedTuple):
    """Layers of some ranks [C, L]."""

    ranks: tuple[int, ...]
    values: FloatArray


@dataclass(slots=True)
class _Alike:
    """Tables of the same layers, of ranks that may hold copies."""

    layout: Layout
    assumed: bool
    tables: list[_Table] = field(default_factory=list)

    def differing(self, bits: int) -> Sequence[int]:
        """Return the layers, by their place, whose bits are not the same in all tables."""
        rows_TL = np.stack([table.values[bits] for table in self.tables])
        differ_L = ((rows_TL != rows_TL[0]) & ~np.isnan(rows_TL)).any(axis=0)
        return [int(place) for place in np.flatnonzero(differ_L)]

    def votes(self, bits: int, place: int) -> Votes:
        votes: Votes = {}
        for table in self.tables:
            if not np.isnan(digest := float(table.values[bits, place])):
                votes.setdefault(digest, []).extend(table.ranks)
        return votes


@dataclass(slots=True)
class StateVotes:
    """What ranks hold of the tensors that no optimizer steps, of which copies differ or may."""

    parted: dict[str, Votes] = field(default_factory=dict)
    """Of copies that are not equal."""
    compared: bool = False
    """Whether any copies were there to be compared."""
    apart: tuple[str, ...] = ()
    """Tensors that differ although nothing shows that they were ever copies."""
    local: tuple[str, ...] = ()
    """Tensors that differ by design, such as the statistics of BatchNorm."""


class LayerCopies:
    """The layers that are only compared, as they come in, node by node, in any order."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, tuple[int, ...], bytes], _Alike] = {}

    def add(
        self,
        family: ColumnFamily,
        block: LayerBlock,
        share: NodeShare,
        layout: Layout,
        values: FloatArray,
    ) -> None:
        """Accept what some ranks of a node hold each."""
        shards = block.shards if family.of_parameters else ()  # those number the ranks
        key = (family.name, *group_key(share), shards, layout.digest)
        alike = self._found.setdefault(key, _Alike(layout, share.assumed))
        alike.tables.append(_Table(block.ranks, values))

    def parted_replicas(self, family: ColumnFamily) -> tuple[str, ...]:
        """Return the layers, of replicas that a wrapper made, whose bits differ."""
        bits = family.names.index(family.key)
        names = {
            alike.layout.names[place]: None
            for key, alike in self._found.items()
            if key[0] == family.name and not alike.assumed
            for place in alike.differing(bits)
        }
        return tuple(names)

    def state(self, assumed: AssumedShares, *, replicated: bool) -> StateVotes:
        """Return what was found of the tensors that no optimizer steps; `assumed` learns from it.

        replicated: whether the ranks train copies of one model.
        """
        found = StateVotes()
        apart: dict[str, None] = {}
        local: dict[str, None] = {}
        for key, alike in self._found.items():
            if key[0] != STATE.name or sum(len(table.ranks) for table in alike.tables) < 2:
                continue
            for place, name, copied in _tensors(alike):
                votes = alike.votes(_BITS, place)
                if copied < 0:
                    local.update({name: None} if len(votes) > 1 else {})
                    continue
                sets = self._copies(alike, assumed, name, place, votes, known=copied > 0)
                found.compared |= bool(sets)
                for ranks in sets:
                    own = {bits: sorted(ranks.intersection(who)) for bits, who in votes.items()}
                    own = {bits: who for bits, who in own.items() if who}
                    if len(own) > 1:
                        found.parted[name] = own
                if not sets and len(votes) > 1 and replicated:
                    apart[name] = None
        found.apart, found.local = tuple(apart), tuple(local)
        return found

    def _copies(
        self,
        alike: _Alike,
        assumed: AssumedShares,
        name: str,
        place: int,
        votes: Votes,
        *,
        known: bool,
    ) -> Sequence[frozenset[int]]:
        """Return the sets of ranks that hold copies of a tensor, as far as anything shows it."""
        group = f"{STATE.name} {name}"
        if known:
            assumed.learn_copies(group, [rank for ranks in votes.values() for rank in ranks])
        varied = any(table.values[_VARIED, place] == 1.0 for table in alike.tables)
        for ranks in votes.values():
            if varied and len(ranks) > 1:
                assumed.learn_copies(group, ranks)
        return assumed.copies_of(group)


def _tensors(alike: _Alike) -> Iterator[tuple[int, str, float]]:
    """Yield each tensor's place, its name, and what is known of copies on other ranks."""
    known = np.stack([table.values[_COPIED] for table in alike.tables]).min(axis=0)
    yield from zip(range(len(known)), alike.layout.names, known.tolist(), strict=True)
