"""Finds the live modules and optimizers among the garbage collector's objects.

One walk at the first step (some 70 ms for 300 000 objects) costs less than global module hooks,
which make `torch.compile` warn and compile twice.
"""

import gc
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.optimizers.library_optimizer import shower_of

_CODE = frozenset({type, ABCMeta, FunctionType, ModuleType})
"""Types of what leads to all code there is, and hardly to a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveObjects:
    """The modules and optimizers that exist in this process, in order of creation, about."""

    modules: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]


def walk(*, young: bool = False) -> LiveObjects:
    """Return the live modules and optimizers. Asks each object's type alone, never the object.

    Optimizers of other libraries than torch come last, as their views.
    young: visit only objects that were made lately, which is quick.
    """
    modules: list[Any] = []
    optimizers: list[Any] = []
    others: list[Any] = []
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
                else others
                if shower_of(ancestors) is not None
                else None
            )
        if found is not None and (found is others or _is_complete(candidate)):
            found.append(candidate)
    optimizers += [view for each in others if (view := _shown(each)) is not None]
    return LiveObjects(modules=tuple(modules), optimizers=tuple(optimizers))


def _shown(optimizer: Any) -> Optimizer | None:
    """Return the view of another library's optimizer; None of one that is not complete yet."""
    show = shower_of(type.__dict__["__mro__"].__get__(type(optimizer)))
    try:
        return None if show is None else show(optimizer)
    except AttributeError:
        return None


def _is_complete(candidate: object) -> bool:
    """Return whether a module's or optimizer's constructor has come far enough to be read."""
    try:
        held = object.__getattribute__(candidate, "__dict__")
    except AttributeError:
        return False
    return not {"_modules", "param_groups"}.isdisjoint(held)


def _is_hooked(ancestors: tuple[type, ...]) -> bool:
    """Return whether torch calls its hooks at the step of an optimizer with these ancestors.

    Steps of a wrapper that never called `Optimizer.__init__` call none; find those within it.
    """
    step = next((kind.__dict__["step"] for kind in ancestors if "step" in kind.__dict__), None)
    return getattr(step, "hooked", False) is True


def _young_objects() -> list[Any]:
    youngest = gc.get_objects(0)  # first: a collection in between moves them on to the next
    young = gc.get_objects(1)
    return youngest + young  # made after both, so that it does not keep itself and its items alive


def _all_objects() -> list[Any]:
    """Return the objects that the garbage collector knows, in order of creation, about.

    It names none of those that the program has set aside by `gc.freeze()`, whose effect must stay:
    these are searched for from the variables of modules and running functions.
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
