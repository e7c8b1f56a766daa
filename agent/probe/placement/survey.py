"""Which share of each parameter this rank holds, and whether replicas reduced their gradients.

Whether gradients were reduced over their replicas before the optimizer steps with them.
Local SGD and its relatives (DiLoCo, post-local SGD, model averaging) step with each rank's own
gradients and average the weights now and then. Until then ranks differ on purpose.
"""

import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.placement import megatron
from mp_agent.probe.placement.axes import (
    Grid,
    PlacementAxis,
    Spread,
    axes_by_parameter,
    declarations,
    exact,
)
from mp_agent.probe.placement.megatron import origins_by_master
from mp_agent.probe.processes.launchers import this_rank
from mp_agent.records.schema import Share

_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."


class Reducers:
    """The wrappers that reduce the gradients of some parameters. Keeps none of them alive.

    any: whether there were any, or an engine does so.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Collection[int]) -> None:
        """Find them among `modules`; `parameters` are given by `id`."""
        self._wrappers = tuple(
            weakref.ref(module)
            for module in modules
            if isinstance(module, (DistributedDataParallel, FSDPModule))
            and any(id(parameter) in parameters for parameter in nn.Module.parameters(module))
        )
        self.any = bool(self._wrappers)

    def reduced(self) -> bool | None:
        """Return whether the last backward reduced gradients over all replicas.

        None where no wrapper reduces any. False also where that is not known: of a communication
        hook that is not torch's own.
        """
        wrappers = self._alive()
        return all(map(_has_reduced, wrappers)) if wrappers else None

    def reduced_present(self) -> bool | None:
        """Return the same of the gradients that are there: FSDP2 keeps others elsewhere."""
        if not self.sharding:
            return self.reduced()
        others = (each for each in self._alive() if not isinstance(each, FSDPModule))
        return all(map(_has_reduced, others))

    @property
    def shard(self) -> bool:
        """Whether a wrapper splits parameters, and reduces gradients of copies that it made."""
        return bool(self.sharding)

    @property
    def sharding(self) -> list[FSDPModule]:
        """The modules whose parameters FSDP2 splits."""
        return [wrapper for wrapper in self._alive() if isinstance(wrapper, FSDPModule)]

    @property
    def replace_late(self) -> bool | None:
        """Whether local gradients stay in place until backward ends; None without a wrapper.

        With `gradient_as_bucket_view` they are reduced where they are, as soon as they can be.
        """
        wrappers = self._alive()
        if not wrappers:
            return None
        return all(getattr(each, "gradient_as_bucket_view", True) is False for each in wrappers)

    def _alive(self) -> list[nn.Module]:
        return [wrapper for ref in self._wrappers if (wrapper := ref()) is not None]


def _has_reduced(wrapper: nn.Module) -> bool:
    if isinstance(wrapper, DistributedDataParallel):
        # Of the last forward: `no_sync()` has restored the other flag by the time of the step.
        if not getattr(wrapper, "require_forward_param_sync", True):
            return False
        return all(_hook_reduces(*pair) for pair in getattr(wrapper, "_comm_hooks", ()))
    state = getattr(wrapper, "_get_fsdp_state", lambda: None)()
    group = getattr(state, "_fsdp_param_group", None)
    return bool(getattr(group, "reduce_grads", True) and getattr(group, "all_reduce_grads", True))


def _hook_reduces(hook: Callable[..., object], state: object) -> bool:
    start = getattr(state, "start_localSGD_iter", None)
    if start is not None:  # PostLocalSGDState, which stops counting at `start`
        return bool(getattr(state, "iter", start) < start)
    return hook is not noop_hook and (hook.__module__ or "").startswith(_HOOKS_OF_TORCH)


def lies_whole(tensor: DTensor) -> bool:
    """Return whether this rank holds a part of `tensor` that is meaningful alone."""
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

    def copies_outside(self, home: frozenset[int]) -> Iterator[PlacementAxis]:
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


def _group_names(meshes: Iterable[DeviceMesh]) -> Iterator[str]:
    """Yield the names of the dimensions of meshes, and of all process groups of several ranks."""
    for mesh in meshes:
        yield from mesh.mesh_dim_names or ()
    world = getattr(distributed_c10d, "_world", None)
    for group in tuple(getattr(world, "pg_map", ())):
        if group.size() > 1:
            yield str(getattr(group, "group_desc", ""))


_SEQUENCE = frozenset({"cp", "sp", "context", "sequence", "seq", "ulysses", "ring"})
_DATA = frozenset({"ddp", "fsdp1", "fsdp2", "hsdp"})
_MEGATRON_DATA = frozenset({"dp", "zero1"})

PARTIAL = "parameters with a partial placement"

ALONE = Share(group="single")

_EXPERT = re.compile(r"(^|[._])experts?([._\d]|$)")


class ParameterPlacement(NamedTuple):
    """The placement of one parameter."""

    share: Share | None
    """None when this rank's part is not to be counted."""
    sources: frozenset[str] = frozenset()
    """What the placement is known from; empty for a parameter that nothing explains."""
    unsupported: str = ""
    """Why it cannot be counted; empty when another rank counts it."""
    data_ranks: frozenset[int] = frozenset()
    """Ranks that train its copies or shards on data of their own, this one among them."""
    elsewhere: bool = False
    """Whether ranks outside the share's home may hold further copies: nothing is known of them."""


class Survey:
    """Finds this rank's share of each parameter of a model."""

    def __init__(
        self, modules: Iterable[nn.Module], root: nn.Module | None, ranks_in_run: int
    ) -> None:
        self._rank = this_rank()
        self._ranks_in_run = ranks_in_run
        modules = tuple(modules)
        self._wrapped = axes_by_parameter(modules)
        self._masters = origins_by_master(modules) if megatron.is_loaded() else {}
        self._declared = declarations.by_parameter()
        model = () if root is None else tuple(root.modules())
        self._fsdp = any(isinstance(module, FSDPModule) for module in model)
        parameters = () if root is None else tuple(nn.Module.parameters(root))
        self._tensor_parallel = TensorParallelMeshes(parameters, fsdp=self._fsdp)
        meshes = {each.device_mesh for each in parameters if isinstance(each, DTensor)}
        self._splits_sequences = any(
            not _SEQUENCE.isdisjoint(re.split(r"[^a-z]+", name.lower()))
            for name in _group_names(meshes)
        )

    def placement_of(self, name: str, parameter: torch.Tensor) -> ParameterPlacement:
        """Return this rank's share of the parameter called `name`. Enters no collective."""
        declared = self._declared.get(id(parameter))
        if megatron.is_shared_copy(parameter) or (declared and not declared.counted):
            return ParameterPlacement(None)
        if isinstance(parameter, DTensor) and not lies_whole(parameter):
            return ParameterPlacement(None, unsupported=PARTIAL)
        if self._ranks_in_run == 1 and not isinstance(parameter, DTensor):
            return ParameterPlacement(ALONE)
        grid = self._grid(parameter)
        if not grid.axes and not (declared and declared.own):
            return ParameterPlacement(_unwrapped(name, parameter))
        sources = frozenset(axis.source for axis in grid.axes) or frozenset({"declared"})
        return ParameterPlacement(
            grid.share(),
            sources,
            data_ranks=self._data_ranks(grid),
            elsewhere=sources == {"ddp"} and len(grid.home) < self._ranks_in_run,
        )

    def _data_ranks(self, grid: Grid) -> frozenset[int]:
        """Return the ranks along the axes of wrappers that average gradients.

        None where ranks may split sequences, as groups are named: these get the same data, and
        FSDP2 takes them for its own.
        """
        if any(axis.source in _MEGATRON_DATA for axis in grid.axes):
            return frozenset(megatron.data_ranks())
        axes = [axis for axis in grid.axes if axis.source in _DATA]
        if not axes or self._splits_sequences:
            return frozenset()
        data = Grid(self._rank)
        for axis in axes:
            data = data.crossed_by(axis)
        return data.home

    def _grid(self, parameter: torch.Tensor) -> Grid:
        if isinstance(parameter, DTensor):
            grid = grid_of(parameter, self._rank, fsdp=self._fsdp)
        else:
            grid = Grid(self._rank)
        for axis in self._axes_elsewhere(parameter, grid.home or frozenset({self._rank})):
            grid = grid.crossed_by(axis)
        return grid

    def _axes_elsewhere(
        self, parameter: torch.Tensor, home: frozenset[int]
    ) -> Iterator[PlacementAxis]:
        """Yield the axes besides those of the tensor itself, the most certain first."""
        declared = self._declared.get(id(parameter))
        if declared is not None:
            yield from declared.axes
        if declared is not None and declared.own:
            return
        yield from self._wrapped.get(id(parameter), ())
        yield from self._tensor_parallel.copies_outside(home)
        if not isinstance(parameter, DTensor):
            yield from megatron.axes_of(parameter, self._masters)


_PLAIN, _EXPERTS, _SHARDS = "unwrapped", "unwrapped experts", "unwrapped shards"


def may_begin_alike(share: Share) -> bool:
    """Return whether ranks may hold equal tensors at first that are no copies: made by one seed."""
    return share.group.startswith((_EXPERTS, _SHARDS))


def _unwrapped(name: str, parameter: torch.Tensor) -> Share:
    """Return the share of a parameter among other ranks that nothing explains.

    The merge judges it by what the ranks hold: copies, or each rank's own. Of experts and shards
    by hand, equal weights at the beginning show nothing.
    """
    if megatron.is_expert(parameter) or _EXPERT.search(name):
        return Share(group=_EXPERTS, assumed=True)
    if megatron.is_tensor_parallel(parameter):
        return Share(group=_SHARDS, assumed=True)
    return Share(group=_PLAIN, assumed=True)
