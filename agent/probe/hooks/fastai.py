"""Hooks on fastai, whose optimizers are its own, and which hands a GradScaler a callback to step.

Its learners may hold an optimizer of torch as well (`OptimWrapper`), which torch's hooks see.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper
from mp_agent.probe.isolation.guard import Guard
from mp_agent.probe.optimizers.library_optimizer import (
    LibraryOptimizer,
    show_by,
    substitute,
    view_of,
)


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap fastai's optimizer and its callback for mixed precision, once they are imported."""

    def reporting(
        before: Callable[[LibraryOptimizer], None] | None,
        after: Callable[[LibraryOptimizer], None] | None,
    ) -> Wrapper:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if before is not None:
                    guard.run("fastai", lambda: before(_shown(self)))
                result = original(self, *args, **kwargs)
                if after is not None:
                    guard.run("fastai", lambda: after(_shown(self)))
                return result

            return method

        return wrap

    def step_begins(view: LibraryOptimizer) -> None:
        events.optimizer_step_begins(view, has_closure=False)

    def wrap_optimizer(owner: type) -> None:
        show_by(owner, _shown)
        patches.replace(owner, "__init__", reporting(None, events.optimizer_made))
        patches.replace(owner, "zero_grad", reporting(events.gradients_cleared, None))
        patches.replace(owner, "step", reporting(step_begins, events.optimizer_step_ended))

    def wrap_before_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def before_step(self: Any) -> Any:
            guard.run("fastai", _name_optimizer, self)
            return original(self)

        return before_step

    def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard.run("fastai", events.scaler_lets_step)
            return original(self, *args, **kwargs)

        return step

    def wrap_mixed_precision(owner: type) -> None:
        patches.replace(owner, "before_step", wrap_before_step)
        patches.replace(owner, "step", wrap_step)

    patches.once_imported("fastai.optimizer", "Optimizer", wrap_optimizer, guard)
    patches.once_imported("fastai.callback.fp16", "MixedPrecision", wrap_mixed_precision, guard)


def _shown(optimizer: Any) -> LibraryOptimizer:
    """Return the view of an optimizer with the groups that this has now."""
    view = view_of(optimizer)
    view.show(zip(optimizer.param_lists, map(dict, optimizer.hypers), strict=True))
    return view


def _name_optimizer(callback: Any) -> None:
    """Say which optimizer the callback passes itself off as."""
    optimizer = callback.learn.opt
    inner = getattr(optimizer, "opt", None)  # of a wrapper: torch's, or fastai's own
    inner = optimizer if inner is None else inner
    substitute(callback, inner if isinstance(inner, Optimizer) else _shown(inner))
