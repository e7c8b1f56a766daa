"""Finds optimizers and modules among the live objects of the process, within a budget.

Finds the live modules and optimizers among the garbage collector's objects.
One walk at the first step (some 70 ms for 300 000 objects) costs less than global module hooks,
which make `torch.compile` warn and compile twice.
"""

import gc
import inspect
import sys
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer


class LibraryOptimizer(Optimizer):
    """Another library's optimizer in the place of one of torch's: what it holds, and its rates.

    It lives as long as that optimizer, and never steps. The library's hooks call `show` where its
    groups may have changed.
    """

    def __init__(self) -> None:
        # Not torch's constructor, which wants parameters; hooks on it do not see this one.
        self.param_groups = []
        self.state = {}  # type: ignore[assignment]
        self.given: dict[int, torch.Tensor] | None = None
        """Gradients that it was called with by `id` of the parameter; None: the parameters'
        own."""

    def show(self, groups: Iterable[tuple[Sequence[torch.Tensor], dict[str, Any]]]) -> None:
        """Hold the parameters of `groups`, each with the rest of its group as torch names it."""
        before = [group["params"] for group in self.param_groups]
        after = [(list(parameters), rest) for parameters, rest in groups]
        kept = len(before) == len(after) and all(
            _same(known, found) for known, (found, _) in zip(before, after, strict=True)
        )
        # Plans are made again when the lists are others.
        self.param_groups = [
            {**rest, "params": before[place] if kept else parameters}
            for place, (parameters, rest) in enumerate(after)
        ]


_shown_by: dict[int, tuple[type, Callable[[Any], LibraryOptimizer]]] = {}
"""A class and what shows its optimizers, by `id` of the class."""
_views: "weakref.WeakKeyDictionary[Any, LibraryOptimizer]" = weakref.WeakKeyDictionary()
_substitutes: "weakref.WeakKeyDictionary[Any, weakref.ref[Optimizer]]" = weakref.WeakKeyDictionary()


def view_of(optimizer: Any) -> LibraryOptimizer:
    """Return the view of another library's optimizer, the same one at each call."""
    found = _views.get(optimizer)
    if found is None:
        found = _views[optimizer] = LibraryOptimizer()
    return found


def show_by(kind: type, shown: Callable[[Any], LibraryOptimizer]) -> None:
    """Let optimizers of the class `kind` that the program has already be found, and shown."""
    _shown_by[id(kind)] = kind, shown


def shower_of(ancestors: Iterable[type]) -> Callable[[Any], LibraryOptimizer] | None:
    """Return what shows optimizers of a class with these ancestors; None for other classes."""
    if not _shown_by:
        return None
    found = (_shown_by[id(kind)][1] for kind in ancestors if id(kind) in _shown_by)
    return next(found, None)


def substitute(stand_in: Any, optimizer: Optimizer) -> None:
    """Remember that a GradScaler is given `stand_in` to step instead of `optimizer`."""
    _substitutes[stand_in] = weakref.ref(optimizer)


def stepped_for(optimizer: Any) -> Any:
    """Return the optimizer that `optimizer` is given to a GradScaler for; itself, mostly."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    try:
        found = _substitutes.get(optimizer)
    except TypeError:  # nothing that a weak reference is possible to
        return optimizer
    return optimizer if found is None else found() or optimizer


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


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


WALKS_FREE = 3
"""Walks over all live objects that are made whatever their cost."""
WALK_SHARE = 0.005
"""Share of the time since the first walk that further ones may take."""

T = TypeVar("T")


class WalkBudget:
    """Keeps walks over all live objects within a share of the time."""

    def __init__(self) -> None:
        self._began_seconds: float | None = None
        self._walks = 0
        self._seconds = 0.0
        self._known = KnownObjects()
        self.complete = False
        """Whether the last walk was over all live objects."""

    @property
    def left(self) -> bool:
        """Whether another walk over all of them is within the budget."""
        if self._began_seconds is None or self._walks < WALKS_FREE:
            return True
        return self._seconds < WALK_SHARE * (perf_counter() - self._began_seconds)

    def walk(self, *, whole: bool = False) -> LiveObjects:
        """Walk over all live objects; beyond the budget, over the young and the known ones.

        What was made since the last walk over all, and is young no longer, is then not found.
        whole: walk over all, whatever the budget.
        """
        self.complete = whole or self.left
        begin_seconds = perf_counter()
        if self._began_seconds is None:
            self._began_seconds = begin_seconds
        live = walk(young=not self.complete)
        if self.complete:
            self._known.note(live)
        else:
            live = self._known.joined(live)
        self._walks += 1
        self._seconds += perf_counter() - begin_seconds
        return live


class KnownObjects:
    """Modules and optimizers of earlier walks, as long as they live. Keeps none of them alive."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def note(self, live: LiveObjects) -> None:
        """Remember what a walk over all objects has found, in place of what was known."""
        self._modules = list(map(weakref.ref, live.modules))
        self._optimizers = list(map(weakref.ref, live.optimizers))

    def joined(self, live: LiveObjects) -> LiveObjects:
        """Return what is known and still lives, followed by what is new in `live`."""
        return LiveObjects(
            modules=distinct([*alive(self._modules), *live.modules]),
            optimizers=distinct([*alive(self._optimizers), *live.optimizers]),
        )


def alive(references: Iterable["weakref.ref[T]"]) -> list[T]:
    """Return those of the objects that still exist."""
    return [each for reference in references if (each := reference()) is not None]


def distinct(objects: Iterable[T]) -> tuple[T, ...]:
    """Return each object once, in order. Compares none: their classes may define equality."""
    return tuple({id(each): each for each in objects}.values())
