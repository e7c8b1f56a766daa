"""Finds what training is made of among the live objects: module tree, names, wrappers, optimizers.

One walk over the garbage collector's objects at the first step (some 70 ms for 300 000 objects)
costs less than global module hooks, which make `torch.compile` warn and compile twice.
"""

import gc
import inspect
import sys
from abc import ABCMeta
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

_OUTSIDE_THE_TREE = 1 << 40

_CODE = frozenset({type, ABCMeta, FunctionType, ModuleType})
"""Types of what leads to all code there is, and hardly to a model."""

_WRAPPER_COMPONENTS = frozenset(
    {
        "module",
        "_forward_module",  # Lightning's Fabric
        "_fsdp_wrapped_module",
        "_orig_mod",
        "_checkpoint_wrapped_module",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveObjects:
    """The modules and optimizers that exist in this process, in order of creation, about."""

    modules: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter of the optimizer under its layer name."""

    name: str
    parameter: torch.Tensor
    place: int
    """Where it stands in the module tree; those outside come after it."""


def walk(*, young: bool = False) -> LiveObjects:
    """Return the live modules and optimizers. Asks each object's type alone, never the object.

    young: look only at objects that were made lately, which is quick.
    """
    modules: list[Any] = []
    optimizers: list[Any] = []
    wanted: dict[int, list[Any] | None] = {}  # by `id`: a class need not be hashable
    for candidate in _young_objects() if young else _all_objects():
        kind = type(candidate)
        try:
            found = wanted[id(kind)]
        except KeyError:
            ancestors = type.__dict__["__mro__"].__get__(kind)
            found = wanted[id(kind)] = (
                modules
                if any(ancestor is nn.Module for ancestor in ancestors)
                else optimizers
                if any(ancestor is Optimizer for ancestor in ancestors) and _is_hooked(ancestors)
                else None
            )
        if found is not None and _is_complete(candidate):
            found.append(candidate)
    return LiveObjects(modules=tuple(modules), optimizers=tuple(optimizers))


def root_module(
    modules: Sequence[nn.Module], parameters: Iterable[torch.Tensor]
) -> nn.Module | None:
    """Return the module that nothing contains and that covers the most of `parameters`.

    Of equals the one with the fewest parameters and modules of its own wins, and of twins the one
    whose parameters come first: all ranks choose the same.
    """
    ranked = _by_fit(modules, parameters)
    return ranked[0] if ranked else None


def named_parameters(
    optimizer: Optimizer, root: nn.Module | None, modules: Sequence[nn.Module] = ()
) -> list[NamedParameter]:
    """Return the optimizer's parameters, each once, under unique names, in module order.

    Names are the optimizer's own `param_names` where it has them, else those of the module tree. A
    parameter outside the tree comes last: under the class of the one of `modules` that holds it,
    such as a critic trained together with its actor, else numbered.
    """
    parameters = list(optimizer_parameters(optimizer))
    given = {**_names_elsewhere(parameters, root, modules), **_names_in_optimizer(optimizer)}
    return name_parameters(parameters, root, given)


def name_parameters(
    parameters: Iterable[torch.Tensor], root: nn.Module | None, given: Mapping[int, str]
) -> list[NamedParameter]:
    """Return parameters, each once, under unique names, in module order.

    given: names that come before those of the module tree, by `id` of the parameter.
    """
    held = {id(parameter): parameter for parameter in parameters}
    names: dict[int, str] = {}
    places: dict[int, int] = {}
    for place, (name, parameter) in enumerate(_named_parameters(root) if root is not None else ()):
        if id(parameter) in held:
            names[id(parameter)], places[id(parameter)] = name, place
    for index, identity in enumerate(held):
        names.setdefault(identity, f"parameter{index}")
    names.update(given)
    short = _unique({identity: strip_wrappers(name) for identity, name in names.items()}, names)
    return [
        NamedParameter(
            name=name, parameter=held[identity], place=places.get(identity, _OUTSIDE_THE_TREE)
        )
        for identity, name in short.items()
    ]


def optimizer_parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def names_parameters(optimizer: Optimizer) -> bool:
    """Return whether the optimizer was given names for its parameters (torch ≥ 2.6)."""
    return any("param_names" in group for group in optimizer.param_groups)


def strip_wrappers(name: str) -> str:
    """Return a parameter name without the components that DDP, FSDP or torch.compile put in."""
    kept = [part for part in name.split(".") if part not in _WRAPPER_COMPONENTS]
    return ".".join(kept) or name


def holders(optimizers: Iterable[Optimizer], parameters: Sequence[torch.Tensor]) -> list[Optimizer]:
    """Return the optimizers that hold any of `parameters`, in the order in which these come.

    Those whose parameters are all held by another one are left out: parts of it, or their copies.
    """
    order = {id(parameter): index for index, parameter in reversed(list(enumerate(parameters)))}
    held = {
        optimizer: {id(parameter) for parameter in optimizer_parameters(optimizer)}
        for optimizer in optimizers
    }
    chosen: list[Optimizer] = []
    for optimizer in sorted(held, key=lambda each: -len(held[each])):
        if not order.keys().isdisjoint(held[optimizer]) and not any(
            held[optimizer] <= held[other] for other in chosen
        ):
            chosen.append(optimizer)
    return sorted(chosen, key=lambda each: min(order.get(i, len(order)) for i in held[each]))


def trains_part_of(optimizer: Optimizer, root: nn.Module | None, held: Collection[int]) -> bool:
    """Return whether an optimizer has parameters of `root` and none that are `held` already."""
    own = list(optimizer_parameters(optimizer))
    apart = not any(id(parameter) in held for parameter in own)
    return root is not None and apart and holds_any(root, own)


def holds_any(root: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any of `parameters` is in the module tree."""
    wanted = set(map(id, parameters))
    return any(id(parameter) in wanted for _, parameter in _named_parameters(root))


def has_gradient(optimizer: Optimizer) -> bool:
    """Return whether there is a gradient for an optimizer to use."""
    return any(parameter.grad is not None for parameter in optimizer_parameters(optimizer))


def _names_elsewhere(
    parameters: Sequence[torch.Tensor], root: nn.Module | None, modules: Sequence[nn.Module]
) -> dict[int, str]:
    """Return names of the parameters outside `root`, by `id`: class of their module, and path."""
    inside = set() if root is None else {id(each) for _, each in _named_parameters(root)}
    left = [parameter for parameter in parameters if id(parameter) not in inside]
    names: dict[int, str] = {}
    classes: Counter[str] = Counter()
    for module in _by_fit(modules, left) if left else ():
        held = {id(parameter): name for name, parameter in _named_parameters(module)}
        own = [id(each) for each in left if id(each) in held and id(each) not in names]
        if own:
            kind = _class_name(module)
            classes[kind] += 1
            prefix = kind if classes[kind] == 1 else f"{kind}{classes[kind]}"
            names.update({identity: f"{prefix}.{held[identity]}" for identity in own})
    return names


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class, below its wrappers."""
    while len(module._modules) == 1:
        ((name, child),) = module._modules.items()
        if name not in _WRAPPER_COMPONENTS or child is None:
            break
        module = child
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _by_fit(modules: Sequence[nn.Module], parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """Return the modules that nothing contains and that hold any of `parameters`, best first."""
    wanted = {id(parameter): index for index, parameter in enumerate(parameters)}
    contained = {
        id(child) for module in modules for child in module._modules.values() if child is not None
    }
    fits: list[tuple[tuple[int, int, int, int], nn.Module]] = []
    for module in modules:
        if id(module) in contained:
            continue
        held = {id(parameter) for _, parameter in _named_parameters(module)}
        found = held & wanted.keys()
        if found:
            size = sum(1 for _ in nn.Module.modules(module))
            first = min(map(wanted.__getitem__, found))
            fits.append(((-len(found), len(held), size, first), module))
    return [module for _, module in sorted(fits, key=lambda fit: fit[0])]


def _young_objects() -> list[Any]:
    youngest = gc.get_objects(0)  # first: a collection in between moves them on to the next
    young = gc.get_objects(1)
    return youngest + young  # made after both, lest it should hold itself, and all in it, alive


def _all_objects() -> list[Any]:
    """Return the objects that the garbage collector knows, in order of creation, about.

    It names none of those that the program has set aside by `gc.freeze()`, whose effect must stay:
    these are looked for from where programs hold on to things.
    """
    objects = gc.get_objects()
    return objects if gc.get_freeze_count() == 0 else [*_frozen_objects(), *objects]


def _frozen_objects() -> Iterator[Any]:
    """Yield what modules and running functions lead to and the collector no longer names."""
    named = set(map(id, gc.get_objects()))
    found: list[Any] = [vars(each) for each in sys.modules.copy().values() if _is_plain(each)]
    for frame in sys._current_frames().values():
        found += _held_by_frames(frame)
    seen: set[int] = set()
    while found:
        new = {id(each): each for each in found if id(each) not in seen}
        seen.update(new)
        found.clear()  # it may hold itself, as a variable of ours
        yield from (each for identity, each in new.items() if identity not in named)
        found = gc.get_referents(*(each for each in new.values() if type(each) not in _CODE))
        for function in new.values():
            if type(function) is FunctionType:
                found += function.__closure__ or ()


def _is_plain(module: object) -> bool:
    return type(module) is ModuleType


def _held_by_frames(frame: FrameType | None) -> Iterator[Any]:
    """Yield what the functions that a thread is in hold by their variables."""
    while frame is not None:
        if frame.f_locals is not frame.f_globals:
            held = frame.f_locals
            yield from list(held.values())
            if type(held) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                held.clear()  # a copy, which would keep them alive
        frame = frame.f_back


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters as they are held, whatever a subclass makes of `named_parameters`."""
    return nn.Module.named_parameters(module)


def _is_complete(candidate: object) -> bool:
    """Return whether a module's or optimizer's constructor has come far enough to be read."""
    try:
        held = object.__getattribute__(candidate, "__dict__")
    except AttributeError:
        return False
    return not {"_modules", "param_groups"}.isdisjoint(held)


def _is_hooked(ancestors: tuple[type, ...]) -> bool:
    """Return whether torch calls its hooks at the step of an optimizer with these ancestors.

    A wrapper that never called `Optimizer.__init__` steps unseen; those within it are to be found.
    """
    step = next((kind.__dict__["step"] for kind in ancestors if "step" in kind.__dict__), None)
    return getattr(step, "hooked", False) is True


def _names_in_optimizer(optimizer: Optimizer) -> dict[int, str]:
    """Return the names that the optimizer was given (torch ≥ 2.6), by `id` of the parameter."""
    return {
        id(parameter): name
        for group in optimizer.param_groups
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
    }


def _unique(short: dict[int, str], full: dict[int, str]) -> dict[int, str]:
    """Return short names, but full ones where short ones collide, numbered where those do too."""
    chosen: dict[int, str] = {}
    taken: set[str] = set()
    for identity, name in short.items():
        if name in taken:
            name = full[identity]
        while name in taken:
            name = f"{name}'"
        taken.add(name)
        chosen[identity] = name
    return chosen
