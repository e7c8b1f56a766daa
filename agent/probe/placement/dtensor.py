"""Axes of DTensors: FSDP2, HSDP and tensor parallelism, alone and across each other."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mp_agent.probe.placement.axes import Grid, PlacementAxis, Spread, exact


def lies_whole(tensor: DTensor) -> bool:
    """Return whether this rank holds a part of `tensor` that means something by itself."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(p.is_partial() for p in tensor.placements)


def grid_of(tensor: DTensor, rank: int, *, fsdp: bool) -> Grid:
    """Return how a tensor that `lies_whole` is laid out over its mesh.

    fsdp: whether FSDP2 manages the model; its dimensions are then the first ones of the mesh.
    """
    mesh = tensor.device_mesh
    axes = [
        _axis(tensor, mesh, dimension, source)
        for dimension, source in enumerate(_sources(tensor, fsdp=fsdp))
    ]
    return exact(rank, axes, mesh.mesh.flatten().tolist())


class TensorParallelMeshes:
    """The meshes along which some parameter of a model is split by tensor parallelism.

    Ranks along such a dimension work on the same data: a parameter of the same model that does not
    lie along it (a norm that no plan mentions) is the same tensor on all of them.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, fsdp: bool) -> None:
        self._fsdp = fsdp
        self._split: dict[DeviceMesh, set[int]] = {}
        for parameter in parameters:
            if isinstance(parameter, DTensor) and lies_whole(parameter):
                split = self._split.setdefault(parameter.device_mesh, set())
                split |= {
                    dimension
                    for dimension, placement in enumerate(parameter.placements)
                    if not placement.is_replicate() and parameter.device_mesh.size(dimension) > 1
                }

    def copies_beside(self, home: frozenset[int]) -> Iterator[PlacementAxis]:
        """Yield the axes along which a tensor held by the ranks `home` alone is copied."""
        for mesh, split in self._split.items():
            covered = _dimensions_of(mesh, home)
            if covered is None or (self._fsdp and not covered):
                continue  # a plain parameter that FSDP2 ignores: its placement is unknown
            for dimension in sorted(split - covered):
                yield PlacementAxis(Spread.COPIED, _ranks_along(mesh, dimension), "tp")


def _axis(tensor: DTensor, mesh: DeviceMesh, dimension: int, source: str) -> PlacementAxis:
    placement = tensor.placements[dimension]
    # is_shard() is false of _StridedShard (FSDP2 over tensor parallelism), which is a shard too.
    spread = Spread.COPIED if placement.is_replicate() else Spread.SPLIT
    tensor_dimension = "" if placement.is_replicate() else str(getattr(placement, "dim", "?"))
    return PlacementAxis(spread, _ranks_along(mesh, dimension), source, tensor_dimension)


def _sources(tensor: DTensor, *, fsdp: bool) -> Sequence[str]:
    """Return what each dimension of a tensor's mesh is there for."""
    count = tensor.device_mesh.ndim
    if not fsdp:
        return ("tp",) * count
    copied = tensor.placements[0].is_replicate()
    if count == 1 or not copied:
        return ("fsdp2",) + ("tp",) * (count - 1)
    return ("hsdp", "hsdp") + ("tp",) * (count - 2)


def _ranks_along(mesh: DeviceMesh, dimension: int) -> tuple[int, ...]:
    """Return the ranks of the mesh along one of its dimensions, through this rank."""
    index: list[int | slice] = list(mesh.get_coordinate() or ())
    index[dimension] = slice(None)
    return tuple(mesh.mesh[tuple(index)].tolist())


def _dimensions_of(mesh: DeviceMesh, home: frozenset[int]) -> set[int] | None:
    """Return along which dimensions of `mesh`, through this rank, the ranks `home` lie.

    None when they are no such part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    for count in range(mesh.ndim):
        for dimensions in combinations(range(mesh.ndim), count):
            index = tuple(
                slice(None) if dimension in dimensions else position
                for dimension, position in enumerate(coordinate)
            )
            if frozenset(mesh.mesh[index].flatten().tolist()) == home:
                return set(dimensions)
    return None
