"""Whether replicas that should be equal are, and if not, which ranks are in the minority."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from mp_agent.records.columns import ColumnFamily
from mp_agent.records.merged import Comparison
from mp_agent.records.reports.rows import NodeRow, WeightDigest

Votes = dict[float, list[int]]
"""Digest → the ranks that have it."""


class ReplicaDigests:
    """The digests of one step, as they come in from the nodes."""

    def __init__(self) -> None:
        self._rows: dict[ColumnFamily, dict[tuple[str, str, int], Votes]] = {}
        """By family; by group, optimizer and shard."""
        self._weights: dict[tuple[str, tuple[str, ...]], Votes] = {}
        """By what is held, and which groups of that are assumed."""

    def add_rows(self, family: ColumnFamily, group: tuple[str, str], row: NodeRow) -> None:
        """Add the digest of each shard of a family's row."""
        for place, (shard, digest) in enumerate(zip(row.shards, row.digests, strict=False)):
            votes = self._rows.setdefault(family, {}).setdefault((*group, shard), {})
            votes.setdefault(digest, []).extend(row.ranks[place :: len(row.shards)])

    def add_weights(self, digests: Iterable[WeightDigest]) -> None:
        """Add the digests of the ranks' weights."""
        for digest in digests:
            votes = self._weights.setdefault((digest.of, digest.assumed), {})
            votes.setdefault(digest.digest, []).extend(digest.ranks)

    def agree(self, family: ColumnFamily) -> bool:
        """Return whether replicas of a family's rows were seen, and all of them are the same."""
        found = _compare(list(self._rows.get(family, {}).values()))
        return found is not None and found.agree

    def compared(
        self, *, skipped: bool, reduced: bool, replicated: Callable[[str], bool]
    ) -> Mapping[str, Comparison]:
        """Return the comparisons that could be made: by the name of the family, and of `weights`.

        Gradients of a skipped step are not compared: nothing was done with them. Weights of plain
        parameters are once their group is known to be `replicated`. Replicas that step with
        gradients of their own (not `reduced`) are meant to differ until they synchronise: then only
        equality is reported.
        """
        comparisons = {
            family.name: _compare(list(rows.values()))
            for family, rows in self._rows.items()
            if family.counts_when_skipped or not skipped
        }
        comparisons["weights"] = _compare(
            [
                votes
                for (_, assumed), votes in self._weights.items()
                if all(map(replicated, assumed))
            ]
        )
        if not reduced:
            comparisons = {kind: _if_equal(found) for kind, found in comparisons.items()}
        return {kind: found for kind, found in comparisons.items() if found is not None}


def _compare(ballots: Sequence[Votes]) -> Comparison | None:
    """Return None where no two ranks hold the same."""
    countable = [votes for votes in ballots if sum(map(len, votes.values())) > 1]
    if not countable:
        return None
    split = [votes for votes in countable if len(votes) > 1]
    minority = {rank for votes in split for rank in _minority(votes)}
    return Comparison(agree=not split, minority_ranks=tuple(sorted(minority)))


def _if_equal(found: Comparison | None) -> Comparison | None:
    return found if found is not None and found.agree else None


def _minority(votes: Votes) -> list[int]:
    """Return the ranks that differ from more than half of all; none when there is no majority."""
    total = sum(map(len, votes.values()))
    majority = max(votes, key=lambda digest: len(votes[digest]))
    if 2 * len(votes[majority]) <= total:
        return []
    return [rank for digest, ranks in votes.items() if digest != majority for rank in ranks]
