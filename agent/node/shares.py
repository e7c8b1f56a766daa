"""Which rows of several ranks are of the same tensors, and which add up."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mp_agent.records.schema import Schema, Share
from mp_agent.records.steps import FloatArray

DIGEST_STEPS = 3
"""Steps on which assumed replicas must agree bit for bit before they count as replicas."""

_SHARED = -1

BlockKey = tuple[str, int, int]
"""Group, shard index, and the owning rank where every rank's tensors are its own (else -1).
Rows with equal keys are replicas: a merge takes one of them."""


@dataclass(frozen=True, slots=True)
class Roster:
    """What the ranks of an attempt hold, whether or not they are present in a given step."""

    world_size: int
    shards: frozenset[tuple[str, int]]
    """Every (group, shard index) that exists as far as the known schemas tell."""
    assumed_groups: frozenset[str]
    strangers_hold_replicas: bool
    """Whether ranks that are not known here can hold nothing but replicas of known shards."""

    def complete(self, taken: Iterable[BlockKey], assumed: "AssumedShares") -> bool:
        """Return whether the blocks of a merge cover every shard of every tensor."""
        keys = set(taken)
        if not self.strangers_hold_replicas or not keys:
            return False
        if not self.shards <= {(group, index) for group, index, _ in keys}:
            return False
        return all(
            len({owner for group, _, owner in keys if group == own}) == self.world_size
            for own in self.assumed_groups
            if assumed.independent(own)
        )


def make_roster(world_size: int, schemas: Mapping[int, Schema]) -> Roster:
    """Return the roster that the schemas of the known ranks, by rank, imply."""
    shares = [share for schema in schemas.values() for share in schema.shares]
    return Roster(
        world_size=world_size,
        shards=frozenset(
            (share.group, index) for share in shares for index in range(share.shard_count)
        ),
        assumed_groups=frozenset(share.group for share in shares if share.assumed),
        strangers_hold_replicas=len(schemas) == world_size
        or all(share.shard_count * share.replica_count >= world_size for share in shares),
    )


class AssumedShares:
    """Judges the shares of plain parameters that no wrapper explains.

    Rows that are bitwise equal on all ranks at the first steps are replicas; rows that once
    differ belong to models of their own and add up. Either verdict stays.
    """

    def __init__(self, verdicts: Mapping[str, bool] | None = None) -> None:
        self.verdicts = dict(verdicts or {})
        """Final verdicts: group → whether its ranks are independent."""
        self._agreed_steps: dict[str, int] = {}

    def observe(self, rows: Iterable[tuple[Share, FloatArray]]) -> None:
        """Compare the rows [C] that the ranks delivered for one step."""
        replicas: dict[tuple[str, int], set[bytes]] = {}
        counts: dict[str, int] = {}
        for share, row in rows:
            if share.assumed and share.group not in self.verdicts:
                replicas.setdefault((share.group, share.shard_index), set()).add(row.tobytes())
                counts[share.group] = counts.get(share.group, 0) + 1
        differing = {group for (group, _), digests in replicas.items() if len(digests) > 1}
        for group in differing:
            self.verdicts[group] = True
        for group, count in counts.items():
            if group not in differing and count > 1:
                self._agree(group)

    def _agree(self, group: str) -> None:
        self._agreed_steps[group] = self._agreed_steps.get(group, 0) + 1
        if self._agreed_steps[group] >= DIGEST_STEPS:
            self.verdicts[group] = False

    def independent(self, group: str) -> bool:
        """Return whether each rank holds tensors of its own under this group's name."""
        return self.verdicts.get(group, False)

    def key(self, share: Share, rank: int) -> BlockKey:
        """Return the key under which a share's row of `rank` enters a merge."""
        alone = share.assumed and self.independent(share.group)
        return (share.group, share.shard_index, rank if alone else _SHARED)
