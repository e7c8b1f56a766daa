"""Placements of parameters that the user declares, where no wrapper shows them."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from mp_agent.errors import SettingError
from mp_agent.probe.identity.world import this_rank, world_size
from mp_agent.probe.placement.axes import PlacementAxis, Spread

Over: TypeAlias = "dist.ProcessGroup | DeviceMesh | Sequence[int]"
"""Ranks: those of a process group or a mesh, or global ranks."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declared placement of some parameters."""

    axes: tuple[PlacementAxis, ...]
    counted: bool
    own: bool
    """Neither split nor copied: this rank alone has the tensor."""


class Declarations:
    """All that was declared in this process; keeps neither modules nor parameters alive.

    generation: rises with each, so that who has read them knows when to read again.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
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
"""Those of this process."""


def _axes(shard: object, replicate: object) -> Iterator[PlacementAxis]:
    split = () if shard is None else _ranks("shard", shard)
    copied = () if replicate is None else _ranks("replicate", replicate)
    if len(set(split) & set(copied)) > 1:
        raise _problem("replicate", replicate, f"shares ranks with shard, which has {split}")
    if split:
        yield PlacementAxis(Spread.SPLIT, split, "declared")
    if copied:
        yield PlacementAxis(Spread.COPIED, copied, "declared")


def _ranks(name: str, over: object) -> tuple[int, ...]:
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
