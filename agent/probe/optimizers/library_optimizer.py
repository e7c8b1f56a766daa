"""Optimizers of libraries that do not derive theirs from torch's, as the probe reads them."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
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
        """By `id` of the parameter, the gradients that it was called with; None: the parameters'
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
"""By `id` of the class."""
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
