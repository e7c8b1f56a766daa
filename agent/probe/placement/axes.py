"""Axes along which a tensor lies over ranks, and the share that follows from them.

A share's group is named by the ranks that hold the tensor and by how it is laid out over them, so
that it reads the same on all of them, and differently for another pipeline stage or expert.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from mp_agent.probe.identity.world import describe_ranks
from mp_agent.records.schema import Share


class Spread(Enum):
    """How a tensor lies along an axis."""

    SPLIT = "shard"
    COPIED = "replicate"


@dataclass(frozen=True, slots=True)
class PlacementAxis:
    """Global ranks, this one among them, along which a tensor is split or copied."""

    spread: Spread
    ranks: tuple[int, ...]
    source: str
    """What it is known from: ddp, fsdp1, fsdp2, hsdp, tp, declared, …"""
    dimension: str = ""
    """Of the tensor that is split, where it is known."""

    @property
    def layout(self) -> str:
        """How the tensor lies along the axis, such as `shard(0)`."""
        return f"{self.spread.value}({self.dimension})" if self.dimension else self.spread.value


@dataclass(frozen=True, slots=True)
class Grid:
    """Axes that cross at this rank, and all ranks that they span together."""

    rank: int
    axes: tuple[PlacementAxis, ...] = ()
    home: frozenset[int] = frozenset()

    def crossed_by(self, axis: PlacementAxis) -> "Grid":
        """Return this grid with one more axis; without it, where it runs along ranks known already.

        Ranks must form a regular grid, as those of all launchers and meshes do: the axis through
        another rank of the grid is then this rank's, moved.
        """
        home = self.home or frozenset({self.rank})
        if len(home.intersection(axis.ranks)) != 1:
            return self
        spanned = frozenset(held + rank - self.rank for held in home for rank in axis.ranks)
        return Grid(self.rank, (*self.axes, axis), spanned)

    def share(self) -> Share:
        """Return this rank's share of a tensor that lies along all axes."""
        home = describe_ranks(self.home or {self.rank})
        shape = "x".join(str(len(axis.ranks)) for axis in self.axes) or "1"
        layout = " ".join(axis.layout for axis in self.axes) or "own"
        shard_index, shard_count = self._flatten(Spread.SPLIT)
        replica_index, replica_count = self._flatten(Spread.COPIED)
        return Share(
            group=f"{layout} over {shape} of ranks {home}",
            shard_index=shard_index,
            shard_count=shard_count,
            replica_index=replica_index,
            replica_count=replica_count,
            home=home,
        )

    def _flatten(self, spread: Spread) -> tuple[int, int]:
        """Return this rank's index along all axes of one kind taken as one, and their extent."""
        axes = [axis for axis in self.axes if axis.spread is spread]
        index = 0
        for axis in axes:
            index = index * len(axis.ranks) + axis.ranks.index(self.rank)
        return index, prod(len(axis.ranks) for axis in axes)


def exact(rank: int, axes: Sequence[PlacementAxis], home: Iterable[int]) -> Grid:
    """Return the grid of `axes` whose ranks are known to be `home`, in any order."""
    return Grid(rank, tuple(axes), frozenset(home))
