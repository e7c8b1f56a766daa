"""Which tensors a run has, how they are split, and which are whole, or copies, in a merge."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from mp_agent.records.columns import GRADIENTS, STATE, ColumnFamily
from mp_agent.records.merged import FIRST
from mp_agent.records.node_report import LayerBlock, Layout, NodeRow, NodeShare
from mp_agent.records.steps import FloatArray, RowForm

Row = TypeVar("Row")

GroupKey = tuple[str, str]
"""Group and optimizer: rows of the same key are of the same tensors."""


def group_key(share: NodeShare) -> GroupKey:
    """Return the key under which a share's rows enter a merge."""
    return (share.group, share.optimizer)


def tensor_elsewhere(share: NodeShare) -> str:
    """Return what a share holds of which ranks outside its home may have copies; "" if none may.

    Of shares that hold the same, and lie over their ranks alike, it is the same.
    """
    layout, _, tensor = share.group.partition(f" of ranks {share.home} ")
    return assumed_name((f"{layout} {tensor}", share.optimizer)) if tensor else ""


def assumed_name(key: GroupKey) -> str:
    """Return the name under which the verdict on an assumed group is kept."""
    group, optimizer = key
    return f"{group} of optimizer {optimizer}" if optimizer else group


@dataclass(frozen=True, slots=True)
class ExpectedShares:
    """What all ranks of a run hold, whether or not they are present in a given step."""

    groups: frozenset[GroupKey]
    """Groups of parameters."""
    strangers_hold_replicas: bool
    """Whether ranks that are not known can hold nothing but replicas of known shards."""
    joint: frozenset[str] = frozenset()
    """The other optimizers that train the model of the first one."""
    own: Mapping[str, frozenset[GroupKey]] = field(default_factory=dict)
    """The groups of families whose rows are not of parameters."""

    @property
    def of_run(self) -> frozenset[str]:
        """The optimizers whose gradients together are the run's."""
        return self.joint | {""}

    def name_of(self, optimizer: str) -> str | None:
        """Return the name of an optimizer next to the run; None where it is not shown."""
        return optimizer or (FIRST if self.joint else None)

    def complete(
        self,
        whole: Collection[GroupKey],
        optimizers: Collection[str] = ("",),
        family: str = GRADIENTS.name,
    ) -> bool:
        """Return whether the groups that are whole are all of a family that `optimizers` step."""
        groups = {key for key in self.own.get(family, self.groups) if key[1] in optimizers}
        return bool(groups) and groups <= set(whole) and self.strangers_hold_replicas


def make_expected_shares(
    shares: Iterable[NodeShare], *, ranks_known: int, world_size: int
) -> ExpectedShares:
    """Return the roster of the shares that `ranks_known` ranks hold."""
    shares = set(shares)
    parameters = [share for share in shares if not share.family]
    families = {share.family for share in shares if share.family}
    return ExpectedShares(
        groups=frozenset(map(group_key, parameters)),
        own={
            family: frozenset(group_key(share) for share in shares if share.family == family)
            for family in families
        },
        strangers_hold_replicas=ranks_known >= world_size
        or all(share.shard_count * share.replica_count >= world_size for share in shares),
        joint=frozenset(share.optimizer for share in shares if share.joint),
    )


class AssumedShares:
    """Judges tensors that no wrapper explains by what the ranks hold, each group separately.

    Ranks hold copies once anything shows it, and for good: copies that part are still copies.
    Other ranks hold their own tensors, whose rows add up.
    """

    def __init__(self, copies: Mapping[str, Iterable[Iterable[int]]] | None = None) -> None:
        """Start with the sets of ranks that hold copies of each other, by group."""
        self._sets: dict[str, list[frozenset[int]]] = {
            group: list(map(frozenset, sets)) for group, sets in (copies or {}).items()
        }
        """By group of which anything is known; ranks in no set hold their own tensors."""
        self._bits: dict[str, frozenset[float]] = {}
        self._varied: set[str] = set()
        self._constant: dict[str, frozenset[int]] = {}
        self.uneven: set[str] = set()
        """Of tensors judged together: not as many are trained by all ranks, so that copies of the
        others do not show."""
        self._homes: dict[str, int] = {}
        self._began_alike: list[frozenset[int]] | None = None
        self.reduced_once = False
        """Whether any replicas had equal gradients, of different data."""
        self.updates_equal = False
        """Whether replicas with different gradients were equal after an update all the same."""

    @property
    def copies(self) -> dict[str, list[list[int]]]:
        """Sets of ranks that hold copies, each ascending, by group that was judged."""
        return {group: sorted(map(sorted, sets)) for group, sets in self._sets.items()}

    @property
    def none_copied(self) -> bool:
        """Whether tensors were judged, and no two ranks hold copies of any."""
        return bool(self._sets) and not any(self._sets.values())

    def learn_copies(self, group: str, ranks: Collection[int]) -> None:
        """Take in that these ranks, at least two, hold copies of each other."""
        sets = self._sets.setdefault(group, [])
        if any(known.issuperset(ranks) for known in sets):
            return
        joined = frozenset(ranks).union(*(known for known in sets if not known.isdisjoint(ranks)))
        self._sets[group] = [joined, *(known for known in sets if known.isdisjoint(ranks))]

    def rank_of(self, home: str, rank: int) -> int:
        """Return the rank that stands for a wrapper's ranks: the one that was first given."""
        return self._homes.setdefault(home, rank)

    def is_judged(self, group: str) -> bool:
        """Return whether it is known what ranks hold of a group."""
        return group in self._sets

    def began_alike(
        self, held: Mapping[int, Collection[tuple[str, float]]]
    ) -> list[frozenset[int]]:
        """Return the ranks that began with the same weights, and have copies of none so far.

        held: what each has, by group, of which the first one given counts.
        """
        if self._began_alike is None and held:
            alike: dict[frozenset[tuple[str, float]], list[int]] = {}
            for rank, bits in held.items():
                alike.setdefault(frozenset(bits), []).append(rank)
            self._began_alike = [frozenset(ranks) for ranks in alike.values() if len(ranks) > 1]
        copies = [own for sets in self._sets.values() for own in sets]
        apart = [
            own for own in self._began_alike or () if all(len(own & each) < 2 for each in copies)
        ]
        self._began_alike = None if self._began_alike is None else apart
        return apart

    def learn_differ(self, group: str) -> None:
        """Take in that ranks do not all have the same row: without evidence these add up."""
        self._sets.setdefault(group, [])

    def moved(self, group: str, bits: Collection[float]) -> frozenset[float] | None:
        """Return those of the weights' bits that no rank had at the last look; None at first."""
        before = self._bits.get(group)
        self._bits[group] = frozenset(bits)
        return None if before is None else frozenset(bits) - before

    def note_first_look(self, group: str, ranks: Collection[int], *, varied: bool) -> None:
        """Accept what weights were at first: equal bits on some ranks, and whether not constant.

        Weights that are all the same number, as those of norms, show nothing by themselves.
        """
        if varied:
            self._varied.add(group)
        elif group not in self._constant:
            self._constant[group] = frozenset(ranks)

    def follow_others(self, *, wrapped: bool) -> None:
        """Let constant weights that were equal at first be copies where all others are.

        wrapped: whether a wrapper holds the rest of the model.
        """
        for group, ranks in self._constant.items():
            if not self._sets.get(group) and (self._varied or wrapped):
                others = (self._sets.get(each, ()) for each in self._varied)
                if all(any(own >= ranks for own in sets) for sets in others):
                    self.learn_copies(group, ranks)

    def copies_of(self, group: str) -> Sequence[frozenset[int]]:
        """Return the sets of ranks that hold copies."""
        return self._sets.get(group, ())

    def chosen(self, group: str, rows: Sequence[tuple[Row, Sequence[int]]]) -> list[Row]:
        """Return the rows to unite: of copies that of the lowest rank, every rank's own otherwise.

        rows: each with the ranks that have it.
        """
        sets = self._sets.get(group)
        present = frozenset(rank for _, ranks in rows for rank in ranks)
        if sets is None or (sets and sets[0] >= present):
            return [min(rows, key=lambda item: min(item[1]))[0]]
        if not sets:
            return [row for row, ranks in rows for _ in ranks]
        by_rank = sorted(((rank, place) for place, (_, ranks) in enumerate(rows) for rank in ranks))
        taken, represented = [], set[int]()
        for rank, place in by_rank:
            if rank not in represented:
                taken.append(rows[place][0])
                represented.update(*(own for own in sets if rank in own))
        return taken

    def whole(self, group: str, present: Collection[int], world_size: int) -> bool:
        """Return whether nothing is missing of a group of which these ranks have rows."""
        if len(present) == world_size or group not in self._sets:
            return True
        copied = [own for own in self._sets[group] if not own.isdisjoint(present)]
        return len(frozenset(present).union(*copied)) == world_size


class SeveralHomes:
    """Groups by what they hold: each a wrapper's, of which others may hold copies elsewhere."""

    def __init__(self) -> None:
        self._homes: dict[str, dict[GroupKey, tuple[str, int]]] = {}

    def add(self, share: NodeShare, rows: Iterable[NodeRow | RowForm | LayerBlock]) -> None:
        """Add rows of some ranks of a share's home."""
        if tensor := tensor_elsewhere(share):
            groups, key = self._homes.setdefault(tensor, {}), group_key(share)
            lowest = min(min(row.ranks) for row in rows)
            before = groups.get(key)
            groups[key] = share.home, lowest if before is None else min(before[1], lowest)

    def ranks(self, assumed: AssumedShares) -> Iterator[tuple[str, Mapping[GroupKey, int]]]:
        """Yield what several homes hold, and the rank that stands for each home's group."""
        for tensor, groups in self._homes.items():
            if len(groups) > 1:
                yield (
                    tensor,
                    {key: assumed.rank_of(home, rank) for key, (home, rank) in groups.items()},
                )

    def repeated(self, assumed: AssumedShares) -> set[GroupKey]:
        """Return the groups that are copies of another home's."""
        found: set[GroupKey] = set()
        for tensor, ranks in self.ranks(assumed):
            if assumed.copies_of(tensor):
                counted = assumed.chosen(tensor, [(key, (rank,)) for key, rank in ranks.items()])
                found |= ranks.keys() - set(counted)
        return found


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
    """What ranks hold of copies that are not equal."""
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
