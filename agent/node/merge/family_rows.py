"""The rows of one family in one step as they come in: equal replicas, and their shards."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isnan, nan

import numpy as np

from mp_agent.node.merge.coverage import (
    AssumedShares,
    GroupKey,
    LayerCopies,
    Votes,
    assumed_name,
    group_key,
)
from mp_agent.node.merge.schema_index import Indices as Places
from mp_agent.records.columns import (
    FEW_WEIGHTS,
    GRADIENTS,
    STATE,
    WEIGHTS,
    ColumnFamily,
    shows_reduction,
)
from mp_agent.records.merged import Comparison, Reduction
from mp_agent.records.reports import NodeRow, NodeShare, WeightSample
from mp_agent.records.step_blocks import RowForm
from mp_agent.records.steps import FloatArray

Columns = tuple[float, ...]
"""A row, in the order of the family's columns."""

PlainRows = Mapping[Columns, Sequence[int]]
"""Rows of one group, each with the ranks that have it."""

AnyRows = Columns | FloatArray
"""A row by itself, or [N, C]: rows of several nodes."""

Rows = Mapping[GroupKey, Sequence[AnyRows]]
"""The rows to unite, by group."""


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

    def add_alike(self, rows: Sequence[RowForm], columns_NC: FloatArray) -> None:
        """Add a row of each of several nodes; the usual ways of splitting need no look at each."""
        if all(len(row.shards) == self.shard_count for row in rows):
            lowest = min(range(len(rows)), key=lambda place: rows[place].replicas[0])
            self.add(rows[lowest], columns_NC[lowest : lowest + 1])
            return
        replicas = {row.replicas for row in rows}
        number = min(replicas)[0]
        if len(replicas) == 1 == len(rows[0].replicas) and number not in self.replicas:
            shards = np.fromiter(chain.from_iterable(row.shards for row in rows), dtype=np.intp)
            if self.complete is None and np.bincount(shards).max() == 1:
                self.replicas.setdefault(number, _ReplicaRows()).begin(shards, columns_NC)
                self._note(number)
                return
        for place, row in enumerate(rows):
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

    def add(self, row: NodeRow, share: NodeShare, names: Sequence[str]) -> None:
        """Add a node's row; names: of its columns, in its order."""
        key, columns = group_key(share), self._fitted(row.columns, names)
        if share.assumed:
            self._assumed.setdefault(key, {}).setdefault(columns, []).extend(row.ranks)
            return
        if key not in self._groups:
            self._groups[key] = RowGroup(share.shard_count)
        self._groups[key].add(row, columns)

    def add_alike(self, rows: Sequence[RowForm], share: NodeShare, columns_NC: FloatArray) -> None:
        """Add a row of each of several nodes, with their columns in this agent's order."""
        key = group_key(share)
        if share.assumed:
            found = self._assumed.setdefault(key, {})
            for row, columns in zip(rows, columns_NC.tolist(), strict=True):
                found.setdefault(_absent_alike(columns), []).extend(row.ranks)
            return
        if key not in self._groups:
            self._groups[key] = RowGroup(share.shard_count)
        self._groups[key].add_alike(rows, columns_NC)

    def any_replica(self) -> dict[str, float]:
        """Return the columns of one replica of every group that a wrapper explains, as one row."""
        return self._merged([row for group in self._groups.values() for row in group.chosen()])

    @property
    def plain(self) -> Mapping[str, PlainRows]:
        """The rows of parameters that no wrapper explains, by the name of their group."""
        return {assumed_name(key): rows for key, rows in self._assumed.items()}

    def chosen(self, assumed: AssumedShares) -> Rows:
        """Return the rows to unite, by group."""
        chosen: dict[GroupKey, Sequence[AnyRows]] = {
            key: group.chosen() for key, group in self._groups.items()
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


_REPLICAS = "replicas of wrappers"
_BITS, _VARIED = WEIGHTS.names.index("bits"), WEIGHTS.names.index("varied")


@dataclass(frozen=True, slots=True)
class PlainParameters:
    """What ranks have of parameters that no wrapper explains, by group."""

    gradients: Mapping[str, PlainRows]
    weights: Mapping[str, PlainRows]
    few_weights: Mapping[str, PlainRows]
    """Which show whether copies part, and nothing of who holds copies."""

    def teach(
        self, assumed: AssumedShares, *, alike_at_first: bool, wrapped: bool
    ) -> frozenset[str]:
        """Let `assumed` learn who holds copies; return the groups that an update left equal.

        Equal bits of weights that were changed since the last look show copies, and those of
        weights that are not all the same do from the beginning, unless ranks begin alike that do
        not train the same (not `alike_at_first`). So do equal gradients, if of equal weights.
        wrapped: whether a wrapper holds other parameters of the model.
        """
        kept: set[str] = set()
        for group, rows in self.weights.items():
            moved = assumed.moved(group, [row[_BITS] for row in rows])
            for row, ranks in rows.items():
                self._look(assumed, group, row, ranks, moved, alike_at_first=alike_at_first)
            if len(rows) == 1 and moved and sum(map(len, rows.values())) > 1:
                kept.add(group)
        for group, rows in self.gradients.items():
            weights = self.weights.get(group, {})
            for row, ranks in rows.items():
                if shows_reduction(row):
                    for equal in _split(ranks, weights):
                        assumed.learn_copies(group, equal)
            if len(rows) > 1:
                assumed.learn_differ(group)
        assumed.follow_others(wrapped=wrapped)
        return frozenset(kept)

    def _look(
        self,
        assumed: AssumedShares,
        group: str,
        row: Columns,
        ranks: Sequence[int],
        moved: frozenset[float] | None,
        *,
        alike_at_first: bool,
    ) -> None:
        """Let `assumed` learn from ranks that have the same bits of some weights."""
        comparable = alike_at_first and not isnan(row[_VARIED])
        if moved is None and comparable and (row[_VARIED] == 1.0 or len(ranks) > 1):
            assumed.note_first_look(group, ranks, varied=row[_VARIED] == 1.0)
        shown = comparable and row[_VARIED] == 1.0
        if len(ranks) > 1 and (shown or (moved and row[_BITS] in moved)):
            assumed.learn_copies(group, ranks)

    def ballots(
        self, rows: Mapping[str, PlainRows], assumed: AssumedShares
    ) -> list[tuple[str, Votes]]:
        """Return what the ranks have that hold copies, with the group; rows are numbered."""
        found: list[tuple[str, Votes]] = []
        for group, own in rows.items():
            for ranks in assumed.copies_of(group):
                votes = {
                    float(place): held
                    for place, who in enumerate(own.values())
                    if (held := sorted(ranks.intersection(who)))
                }
                if _voters(votes) > 1:
                    found.append((group, votes))
        return found

    def all_copied(self, assumed: AssumedShares) -> bool:
        """Return whether all ranks that are here hold copies of every one of them."""
        return all(
            any(all(map(own.issuperset, rows.values())) for own in assumed.copies_of(group))
            for group, rows in self.gradients.items()
        )

    def any_reduced(self, assumed: AssumedShares) -> bool:
        """Return whether all ranks that hold copies of any tensor have equal gradients of it."""
        return any(
            shows_reduction(row) and any(own <= set(ranks) for own in assumed.copies_of(group))
            for group, rows in self.gradients.items()
            for row, ranks in rows.items()
        )


class ReplicaDigests:
    """The digests of one step, as they come in from the nodes."""

    def __init__(self) -> None:
        self._rows: dict[ColumnFamily, dict[tuple[str, str, int], Votes]] = {}
        """By family; by group, optimizer and shard. Of replicas that a wrapper made."""
        self._samples: dict[str, Votes] = {}
        """Samples of a few weights, by what is held."""

    def add_rows(
        self,
        family: ColumnFamily,
        group: tuple[str, str],
        row: NodeRow | RowForm,
        digests: Sequence[int],
    ) -> None:
        """Add the digest of each shard of a family's row."""
        for place, (shard, digest) in enumerate(zip(row.shards, digests, strict=False)):
            votes = self._rows.setdefault(family, {}).setdefault((*group, shard), {})
            votes.setdefault(digest, []).extend(row.ranks[place :: len(row.shards)])

    def add_samples(self, samples: Iterable[WeightSample]) -> None:
        """Add the digests of a few weights of the ranks."""
        for sample in samples:
            votes = self._samples.setdefault(sample.of, {})
            votes.setdefault(sample.digest, []).extend(sample.ranks)

    def compared(
        self,
        plain: PlainParameters,
        assumed: AssumedShares,
        *,
        step: "StepFacts",
        layers: LayerCopies | None = None,
    ) -> tuple[Mapping[str, Comparison], Reduction | None]:
        """Return the comparisons that could be made, by kind, and whether copies were reduced.

        Gradients of a skipped step are not compared: nothing was done with them. Copies that step
        with gradients of their own differ until they synchronise: then only equality is reported.
        layers: of the same step, as far as they are here; they name the tensors.
        """
        kept = plain.teach(
            assumed,
            alike_at_first=step.alike_at_first,
            wrapped=step.wrapper_reduced is not None,
        )
        replicas = _compare([*self._rows.get(WEIGHTS, {}).values()])
        equal_before = replicas is not None and replicas.agree
        reduction = self._reduction(plain, assumed, kept, step, equal_before=equal_before)
        gradients = list(self._rows.get(GRADIENTS, {}).values())
        weights = self._weights(
            WEIGHTS,
            plain.ballots(plain.weights, assumed),
            () if layers is None else layers.parted_replicas(WEIGHTS),
        )
        if weights is None:
            few = self._weights(FEW_WEIGHTS, plain.ballots(plain.few_weights, assumed))
            weights = None if few is None or few.agree else few  # the others may still differ
        found = {
            GRADIENTS.name: None if step.skipped else _compare(gradients),
            WEIGHTS.name: weights,
            STATE.name: _compare_state(
                layers, assumed, replicated=not step.any_split and plain.all_copied(assumed)
            ),
        }
        if assumed.updates_equal:
            found[GRADIENTS.name] = _if_equal(found[GRADIENTS.name])
        if reduction is not None and not reduction.reduced:
            found = {kind: _if_equal(own) for kind, own in found.items()}
        return {kind: own for kind, own in found.items() if own is not None}, reduction

    def _weights(
        self,
        family: ColumnFamily,
        plain: Sequence[tuple[str, Votes]],
        tensors: Sequence[str] = (),
    ) -> Comparison | None:
        """Return how copies of weights compare; plain: of those that no wrapper explains."""
        return _compare(
            [*self._rows.get(family, {}).values(), *(votes for _, votes in plain)],
            (*(tensor_of(group) for group, votes in plain if len(votes) > 1), *tensors),
        )

    def _reduction(
        self,
        plain: PlainParameters,
        assumed: AssumedShares,
        kept: frozenset[str],
        step: "StepFacts",
        *,
        equal_before: bool,
    ) -> Reduction | None:
        """Return whether copies stepped with the same gradients; None if nothing shows it.

        equal_before: whether the weights of replicas that a wrapper made were found equal.
        """
        replicas = list(self._rows.get(GRADIENTS, {}).values())
        compared = _compare(replicas)
        ballots = [votes for votes in replicas if _voters(votes) > 1]
        ballots += (votes for _, votes in plain.ballots(plain.gradients, assumed))
        if not ballots and step.wrapper_reduced is not False:
            return None
        equal = step.gradients_count and compared is not None and compared.agree
        everywhere = all(len(votes) == _voters(votes) for votes in ballots)
        claimed = step.wrapper_reduced is True
        if claimed or (step.wrapper_reduced is None and replicas):
            assumed.reduced_once |= equal
            lost = claimed and everywhere
            moved = self._moved(assumed)
            # An optimizer may reduce within its step, or send the weights that each rank updates.
            assumed.updates_equal |= lost and equal_before and moved and not assumed.reduced_once
            return Reduction(
                reduced=not lost or assumed.reduced_once or assumed.updates_equal,
                equal_before=equal_before,
                claimed=claimed,
                everywhere=everywhere and not assumed.updates_equal,
            )
        reduced = equal or plain.any_reduced(assumed) or bool(kept)
        assumed.reduced_once |= reduced
        again = any(len(votes) == 1 and _voters(votes) > 1 for votes in self._samples.values())
        return Reduction(
            reduced=reduced,
            equal_before=again or not self._samples,
            wrapped=step.wrapper_reduced is not None,
            everywhere=everywhere,
        )

    def _moved(self, assumed: AssumedShares) -> bool:
        """Return whether replicas have other weights than when they were last compared."""
        bits = {digest for votes in self._rows.get(WEIGHTS, {}).values() for digest in votes}
        return bool(bits and assumed.moved(_REPLICAS, bits))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What else is known of the step."""

    skipped: bool
    wrapper_reduced: bool | None
    """Whether wrappers reduced the gradients; None where no wrapper reduces any."""
    gradients_count: bool
    """Whether there are gradients, finite and not all zero."""
    any_split: bool
    """Whether any tensor is known not to lie on all ranks as a whole."""
    alike_at_first: bool
    """Whether ranks that begin with equal weights train the same model: each has its own loss."""


def tensor_of(group: str) -> str:
    """Return the tensor that a group of plain parameters is named by."""
    return group.partition(" of optimizer ")[0].rpartition(" ")[2]


def _split(ranks: Sequence[int], weights: PlainRows) -> list[list[int]]:
    """Return the ranks by what they hold, where that was looked at; without single ones."""
    bits = {rank: row[_BITS] for row, held in weights.items() for rank in held}
    found: dict[float | None, list[int]] = {}
    for rank in ranks:
        found.setdefault(bits.get(rank), []).append(rank)
    return [own for own in found.values() if len(own) > 1]


def _voters(votes: Votes) -> int:
    return sum(map(len, votes.values()))


def _compare(ballots: Sequence[Votes], tensors: tuple[str, ...] = ()) -> Comparison | None:
    """Return None where no two ranks hold the same."""
    countable = [votes for votes in ballots if _voters(votes) > 1]
    if not countable:
        return None
    split = [votes for votes in countable if len(votes) > 1]
    return Comparison(
        agree=not split,
        minority_ranks=_minorities(split),
        tensors=tuple(dict.fromkeys(tensors)) if split else (),
    )


def _compare_state(
    layers: LayerCopies | None, assumed: AssumedShares, *, replicated: bool
) -> Comparison | None:
    """Return how tensors that no optimizer steps compare; None where there is nothing to say."""
    if layers is None:
        return None
    found = layers.state(assumed, replicated=replicated)
    if not (found.compared or found.apart or found.local):
        return None
    return Comparison(
        agree=not found.parted,
        minority_ranks=_minorities(found.parted.values()),
        tensors=tuple(found.parted),
        unjudged=found.apart,
        local=found.local,
    )


def _if_equal(found: Comparison | None) -> Comparison | None:
    return found if found is not None and found.agree else None


def _minorities(split: Iterable[Votes]) -> tuple[int, ...]:
    return tuple(sorted({rank for votes in split for rank in _minority(votes)}))


def _minority(votes: Votes) -> list[int]:
    """Return the ranks that differ from more than half of all; none when there is no majority."""
    total = _voters(votes)
    majority = max(votes, key=lambda digest: len(votes[digest]))
    if 2 * len(votes[majority]) <= total:
        return []
    return [rank for digest, ranks in votes.items() if digest != majority for rank in ranks]
