"""The rows of one group at one step as they come in: one of equal replicas, and all its shards."""

from dataclasses import dataclass, field

from mp_agent.records.rows import NodeRow

Columns = tuple[tuple[float, ...], ...]
"""The parts of each gradient column."""


@dataclass(slots=True)
class _Replica:
    """What is there of one replica of a group."""

    shards: set[int] = field(default_factory=set)
    rows: list[Columns] = field(default_factory=list)


@dataclass(slots=True)
class RowGroup:
    """The replicas of a group that may still be the one to take."""

    shard_count: int
    complete: int | None = None
    """The lowest replica of which every shard is there."""
    replicas: dict[int, _Replica] = field(default_factory=dict)

    def add(self, row: NodeRow, columns: Columns) -> None:
        """Take in a node's row, with its columns in this agent's order."""
        for number in row.replicas:
            if self.complete is not None and number >= self.complete:
                return
            replica = self.replicas.setdefault(number, _Replica())
            if replica.shards.isdisjoint(row.shards):
                replica.shards.update(row.shards)
                replica.rows.append(columns)
            if len(replica.shards) >= self.shard_count:
                self.complete = number
                self.replicas = {i: r for i, r in self.replicas.items() if i <= number}

    def chosen(self) -> list[Columns]:
        """Return the rows of the lowest complete replica, else of the one with most shards."""
        if self.complete is not None:
            return self.replicas[self.complete].rows
        return max(sorted(self.replicas.items()), key=lambda item: len(item[1].shards))[1].rows
