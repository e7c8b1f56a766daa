"""The axes of a device mesh, those that a script declares, and which of them hold copies.

Axes along which a tensor lies over ranks, and the share that follows from them.
A share's group is named by the ranks that hold the tensor and by how it is laid out over them, so
that it reads the same on all of them, and differently for another pipeline stage or expert.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from mp_agent.errors import SettingError
from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.processes.launchers import describe_ranks, this_rank, world_size
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
    """Dimension of the tensor that is split, where it is known."""

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


def axes_by_parameter(modules: Iterable[nn.Module]) -> Mapping[int, tuple[PlacementAxis, ...]]:
    """Return the axes of every parameter that a wrapper among `modules` reduces, by `id`.

    A wrapper whose process group was destroyed reduces nothing any more.
    """
    found: dict[int, tuple[PlacementAxis, ...]] = {}
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            axis = PlacementAxis(Spread.COPIED, _ranks(module.process_group), "ddp")
            if axis.ranks:
                found.update((id(parameter), (axis,)) for parameter in _reduced_by(module))
        handle = vars(module).get("_handle")
        if hasattr(handle, "flat_param"):  # FSDP1's FlatParamHandle, which is not public
            axes = tuple(_axes_of_unit(module, handle))
            if all(axis.ranks for axis in axes):
                found.update((id(parameter), axes) for parameter in _parameters_of(handle))
    return found


def _reduced_by(wrapper: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """Return the parameters that DDP reduces: those that it found when it was made.

    None where it reduces fewer than require gradients by now, since it does not say which: what
    the ranks hold then shows that.
    """
    ignored = wrapper.parameters_to_ignore
    present = [p for n, p in nn.Module.named_parameters(wrapper.module) if n not in ignored]
    known = {id(parameter) for parameter in getattr(wrapper, "_module_parameters", present)}
    held = [parameter for parameter in present if id(parameter) in known]
    reduced = _reduced_count(wrapper)
    if reduced is not None and reduced < sum(parameter.requires_grad for parameter in held):
        return ()
    return held


def _reduced_count(wrapper: DistributedDataParallel) -> int | None:
    """Return of how many parameters DDP reduces the gradients; None where that is not known."""
    try:
        found = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        count = int(found["num_parameter_tensors"])
    except (AttributeError, KeyError, RuntimeError):
        return None
    return count + len(getattr(wrapper, "_delay_all_reduce_params", ()))


def _parameters_of(handle: Any) -> Iterator[torch.Tensor]:
    """Yield what an optimizer may hold of an FSDP1 unit: its flat parameter, or the originals."""
    yield handle.flat_param
    yield from getattr(handle.flat_param, "_params", None) or ()


def _axes_of_unit(module: nn.Module, handle: Any) -> Iterator[PlacementAxis]:
    across_nodes = vars(module).get("_inter_node_pg")
    if across_nodes is not None:
        yield PlacementAxis(Spread.COPIED, _ranks(across_nodes), "fsdp1")
    spread = Spread.SPLIT if handle.uses_sharded_strategy else Spread.COPIED
    yield PlacementAxis(
        spread, _ranks(handle.process_group), "fsdp1", "0" if spread is Spread.SPLIT else ""
    )


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of a group; none if it was destroyed."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return ()


Over: TypeAlias = "dist.ProcessGroup | DeviceMesh | Sequence[int]"
"""Ranks: those of a process group or a mesh, or global ranks."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declared placement of some parameters."""

    axes: tuple[PlacementAxis, ...]
    counted: bool
    own: bool
    """Neither split nor copied: this rank alone has the tensor."""


class _DeclaredRef(WeakIdRef, TensorRef):
    """A parameter as a key."""

    __slots__ = ()


class Declarations:
    """All that was declared in this process; keeps neither modules nor parameters alive.

    generation: rises with each, so that who has read them knows when to read again.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=_DeclaredRef)
        self._modules: weakref.WeakKeyDictionary[nn.Module, Declaration] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, target: object, shard: object, replicate: object, counted: object) -> None:
        """Declare where `target` lies. Raises SettingError, naming the argument and its value."""
        if not isinstance(target, (nn.Module, torch.Tensor)):
            raise _problem("target", target, "must be a module or a parameter")
        if not isinstance(counted, bool):
            raise _problem("counted", counted, "must be True or False")
        axes = tuple(_axes(shard, replicate))
        own = shard is None and replicate is None
        declaration = Declaration(axes, counted, own)
        if isinstance(target, nn.Module):
            self._modules[target] = declaration
        else:
            self._parameters[target] = declaration
        self.generation += 1

    def by_parameter(self) -> Mapping[int, Declaration]:
        """Return each parameter's declaration, by `id`: its own, else its closest module's."""
        found: dict[int, Declaration] = {}
        modules = list(self._modules.items())
        for module, declaration in sorted(modules, key=lambda item: -_size(item[0])):
            for parameter in nn.Module.parameters(module):
                found[id(parameter)] = declaration
        found.update((id(parameter), self._parameters[parameter]) for parameter in self._parameters)
        return found


declarations = Declarations()
"""The declarations of this process."""


def _axes(shard: object, replicate: object) -> Iterator[PlacementAxis]:
    split = () if shard is None else _declared_ranks("shard", shard)
    copied = () if replicate is None else _declared_ranks("replicate", replicate)
    if len(set(split) & set(copied)) > 1:
        raise _problem("replicate", replicate, f"shares ranks with shard, which has {split}")
    if split:
        yield PlacementAxis(Spread.SPLIT, split, "declared")
    if copied:
        yield PlacementAxis(Spread.COPIED, copied, "declared")


def _declared_ranks(name: str, over: object) -> tuple[int, ...]:
    """Return the ranks that `over` stands for, this one among them."""
    if isinstance(over, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(over))
    elif isinstance(over, DeviceMesh):
        ranks = tuple(over.mesh.flatten().tolist())
    elif isinstance(over, Iterable) and not isinstance(over, (str, bytes, torch.Tensor)):
        ranks = tuple(over)
    else:
        raise _problem(name, over, "must be a process group, a device mesh or a list of ranks")
    if not all(type(rank) is int and 0 <= rank < world_size() for rank in ranks):
        raise _problem(name, over, f"must hold ranks from 0 to {world_size() - 1}")
    if len(set(ranks)) != len(ranks):
        raise _problem(name, over, "holds a rank twice")
    if this_rank() not in ranks:
        raise _problem(name, over, f"does not hold this rank, {this_rank()}")
    return ranks


def _size(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


def _problem(name: str, value: object, what: str) -> SettingError:
    return SettingError(f"{name} has value {value!r}: {what}")
