"""What the ranks agree on before they reduce: the groups of tensors that any of them measures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mp_agent.records.schema import Schema, Share


class TensorGroup(NamedTuple):
    """Tensors of which ranks hold shards and replicas, as in `Share`."""

    optimizer: str
    joint: bool
    group: str
    assumed: bool
    shard_count: int
    replica_count: int

    @classmethod
    def of(cls, share: Share) -> "TensorGroup":
        """Return the group that a rank's share is a part of."""
        return cls(
            share.optimizer,
            share.joint,
            share.group,
            share.assumed,
            share.shard_count,
            share.replica_count,
        )

    @property
    def is_of_run(self) -> bool:
        """Whether its gradients are the run's, or a part of them."""
        return self.joint or not self.optimizer


class GroupLayout(NamedTuple):
    """The groups of all ranks, in the same order on each."""

    groups: tuple[TensorGroup, ...]

    @classmethod
    def of(cls, groups_of_ranks: Iterable[Sequence[TensorGroup]]) -> "GroupLayout":
        """Return the layout of what each rank has."""
        found = {group for groups in groups_of_ranks for group in groups}
        return cls(tuple(sorted(found)))

    def holds(self, schema: Schema) -> bool:
        """Return whether every share of a rank's schema has its place."""
        return set(groups_of(schema)) <= set(self.groups)

    @property
    def positions(self) -> Mapping[TensorGroup, int]:
        """Where each group stands."""
        return {group: position for position, group in enumerate(self.groups)}


def groups_of(schema: Schema) -> list[TensorGroup]:
    """Return the groups of a rank's shares of parameters, in the order of the shares."""
    return [TensorGroup.of(share) for share in schema.shares if not share.family]
