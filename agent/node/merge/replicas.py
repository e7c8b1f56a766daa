"""Whether replicas are equal, and which ranks hold copies that no wrapper explains."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan

from mp_agent.node.merge.coverage import (
    AssumedShares,
    LayerCopies,
    Votes,
)
from mp_agent.node.merge.family_rows import Columns, PlainRows
from mp_agent.records.columns import (
    FEW_WEIGHTS,
    GRADIENTS,
    STATE,
    WEIGHTS,
    ColumnFamily,
    shows_reduction,
)
from mp_agent.records.merged import Comparison, Reduction
from mp_agent.records.node_report import NodeRow, WeightSample
from mp_agent.records.steps import RowForm

_SQUARES = GRADIENTS.names.index("sum_squares")
_REPLICAS = "replicas of wrappers"
_BITS, _VARIED, _ELEMENTS = map(WEIGHTS.names.index, ("bits", "varied", "elements"))
_BY_CHANCE_ELEMENTS = 1024
"""Fewer may be equal after a step by the signs of gradients alone, such as the first one of Adam:
if ranks agree on 99 of 100 signs, so many are the same at one step in 30 000."""


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
        kept: dict[str, bool] = {}
        """Whether the groups that an update left equal may be so by chance."""
        for group, rows in self.weights.items():
            if "*" in tensor_of(group) and len({row[_ELEMENTS] for row in rows}) > 1:
                assumed.uneven.add(group)
            moved = assumed.moved(group, [row[_BITS] for row in rows])
            for row, ranks in rows.items():
                self._look(assumed, group, row, ranks, moved, alike_at_first=alike_at_first)
            if len(rows) == 1 and moved and sum(map(len, rows.values())) > 1:
                ((row, ranks),) = rows.items()
                kept[group] = self._may_be_chance(group, row, ranks)
        for group, rows in self.gradients.items():
            weights = self.weights.get(group, {})
            for row, ranks in rows.items():
                if shows_reduction(row):
                    for equal in _split(ranks, weights):
                        assumed.learn_copies(group, equal)
            if len(rows) > 1:
                assumed.learn_differ(group)
        assumed.follow_others(wrapped=wrapped)
        # An optimizer that reduces within its step keeps all that it steps equal.
        everything = len(kept) == len(self.weights) and self._elements >= _BY_CHANCE_ELEMENTS
        return frozenset(group for group, chance in kept.items() if everything or not chance)

    def uneven(self, assumed: AssumedShares) -> tuple[str, ...]:
        """Return the groups of which ranks train different parts, and copies may not show."""
        found = assumed.uneven.intersection(self.gradients)
        return tuple(sorted(group for group in found if not self._all_alike(assumed, group)))

    def _all_alike(self, assumed: AssumedShares, group: str) -> bool:
        """Return whether all ranks that have gradients of a group hold copies of it."""
        ranks = [*chain.from_iterable(self.gradients[group].values())]
        return any(own.issuperset(ranks) for own in assumed.copies_of(group))

    def teach_of_homes(self, assumed: AssumedShares, *, alike_at_first: bool) -> tuple[str, ...]:
        """Let `assumed` learn which homes hold copies, by rows of which each is a home's.

        Return those with gradients of which nothing shows it. Equal weights at the beginning show
        no copies, since parts of a tensor are equal too that are made by one seed, or all zeros;
        but where all weights of two homes are, and no gradients, it may be one model, averaged
        now and then. alike_at_first: not where only some ranks have their own loss.
        """
        self.teach(assumed, alike_at_first=False, wrapped=False)
        for group, rows in self.weights.items():
            if len(rows) > 1:
                assumed.learn_differ(group)
        held: dict[int, list[tuple[str, float]]] = {}
        for group, rows in self.weights.items():
            for row, ranks in rows.items():
                for rank in ranks:
                    held.setdefault(rank, []).append((group, row[_BITS]))
        began_alike = assumed.began_alike(held) if alike_at_first else ()
        return tuple(
            group
            for group, rows in self.gradients.items()
            if sum(map(len, rows.values())) > 1
            and any(row[_SQUARES] > 0.0 for row in rows)
            and (
                not assumed.is_judged(group)
                or (group in assumed.uneven and not self._all_alike(assumed, group))
                or any(
                    len(own.intersection(chain.from_iterable(rows.values()))) > 1
                    for own in began_alike
                )
            )
        )

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
        if len(ranks) < 2:
            return
        if moved and row[_BITS] in moved:
            shown = not self._may_be_chance(group, row, ranks)
        else:
            shown = comparable and row[_VARIED] == 1.0
        if shown:
            assumed.learn_copies(group, ranks)

    def _may_be_chance(self, group: str, row: Columns, ranks: Sequence[int]) -> bool:
        """Return whether an update may have left a group equal without equal gradients."""
        gradients = self.gradients.get(group, {})
        if row[_ELEMENTS] >= _BY_CHANCE_ELEMENTS or len(gradients) < 2:
            return False
        # Looked up once: each of 100 000 ranks may have gradients of its own.
        alike = next((held for held in gradients.values() if ranks[0] in held), ())
        return not set(ranks) <= set(alike)

    @property
    def _elements(self) -> float:
        return sum(max(row[_ELEMENTS] for row in rows) for rows in self.weights.values())

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
            reduction = replace(reduction, withheld=_differing(found))
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
        of_wrapper = [votes for votes in replicas if _voters(votes) > 1]
        of_plain = plain.ballots(plain.gradients, assumed)
        ballots = [*of_wrapper, *(votes for _, votes in of_plain)]
        if not ballots and step.wrapper_reduced is not False:
            return self._looked_at() if step.left_out else None
        equal = step.gradients_count and compared is not None and compared.agree
        everywhere = all(len(votes) == _voters(votes) for votes in ballots)
        claimed = step.wrapper_reduced is True
        if claimed or (step.wrapper_reduced is None and replicas):
            # What a wrapper leaves out does not contradict it, as next to shards.
            everywhere &= bool(of_wrapper)
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
        # Where ranks step slices alone, their own gradients are those of no averaging to come.
        sliced = step.any_split and step.gradients_count and not ballots
        return Reduction(
            reduced=reduced,
            equal_before=self._any_alike() or not (self._samples or sliced),
            wrapped=step.wrapper_reduced is not None,
            everywhere=everywhere,
        )

    def _looked_at(self) -> Reduction | None:
        """Return what weights show of a step without gradients; None where none were sampled."""
        if not self._samples:
            return None
        return Reduction(
            reduced=False, equal_before=self._any_alike(), wrapped=False, measured=False
        )

    def _any_alike(self) -> bool:
        """Return whether ranks that may hold copies had the same samples of weights."""
        return any(len(votes) == 1 and _voters(votes) > 1 for votes in self._samples.values())

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
    left_out: bool
    """Whether a rank left out measuring its gradients by plan."""
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


def _differing(found: Mapping[str, Comparison | None]) -> frozenset[str]:
    """Return the kinds of which copies differ."""
    return frozenset(kind for kind, own in found.items() if own is not None and not own.agree)


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
