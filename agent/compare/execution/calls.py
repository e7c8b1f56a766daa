"""The calls of a model's modules on one side, each stopped at its begin and its end."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from mp_agent.compare.execution.lockstep import REFERENCE, Lockstep, SideEvent
from mp_agent.compare.execution.precision import LOSS, Precision
from mp_agent.compare.execution.randomness import Randomness
from mp_agent.compare.measure.trees import mapped, tensors_of

Substitute = Callable[[str], Any]
"""From a module's name to what its next call is to return."""


@dataclass(slots=True)
class Finished:
    """A call within another one: what it returned, and the random numbers after it."""

    module: str
    outputs: Any
    versions: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    """Of the candidate's outputs."""
    randomness: Randomness


@dataclass(slots=True, eq=False)
class Frame:
    """A call under way on one side."""

    module: str
    index: int
    """Among the calls of this module within the call around it."""
    args: Any
    kwargs: Any
    randomness: Randomness
    versions: tuple[int, ...]
    children: list[Finished] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    measured: Any = None
    """What the observer knows of it; None where the other side had no such call."""
    parent: "Frame | None" = None

    @property
    def end(self) -> Hashable:
        """The key of its end."""
        return ("end", self.module, self.index)


class Calls:
    """Wraps the forward of every module in a copy of the model."""

    def __init__(
        self, side: int, model: nn.Module, precision: Precision, lockstep: Lockstep | None
    ) -> None:
        self.model = model
        self.precision = precision
        self.modules = dict(model.named_modules())
        self._side = side
        self._lockstep = lockstep
        self._stack: list[Frame] = []
        self._thread = 0
        self._substitute: Substitute | None = None
        self._depth = 0
        self._forwards: dict[str, Callable[..., Any]] = {}
        for name, module in self.modules.items():
            self._forwards[name] = module.forward
            module.forward = self._wrapped(name, module, module.forward)

    def close(self) -> None:
        """Unwrap all modules, so that nothing refers to the copy in a circle."""
        for module in self.modules.values():
            module.__dict__.pop("forward", None)
        self._forwards.clear()
        self.modules = {}
        self._stack = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Stop at the calls of this thread; not at what the backward pass computes again."""
        self._thread = get_ident()
        try:
            yield
        finally:
            self._thread = 0

    def call_loss(self, loss: Callable[..., Any], *args: Any) -> Any:
        """Call the loss function as if it were a module around the model."""
        self._forwards[LOSS] = loss
        return self._called(LOSS, None, loss, args, {})

    def replay(self, name: str, args: Any, kwargs: Any, substitute: Substitute) -> Any:
        """Call a module's forward on the present thread; modules within it return substitutes."""
        self._substitute = substitute
        try:
            module = self.modules.get(name)
            if name == LOSS:
                args = (self.model, *args[1:])
            return self.precision.call(name, module, self._forwards[name], args, kwargs)
        finally:
            self._substitute = None

    def _wrapped(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Any:
        @wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self._called(name, module, forward, args, kwargs)

        return traced

    def _called(
        self,
        name: str,
        module: nn.Module | None,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        if self._substitute is not None:
            return self._substitute(name)
        if get_ident() != self._thread or self._lockstep is None:
            return self.precision.call(name, module, forward, args, kwargs)
        frame = self._begin(self._lockstep, name, args, kwargs)
        outputs = self.precision.call(name, module, forward, args, kwargs)
        self._stack.pop()
        self._lockstep.post(self._side, SideEvent(frame.end, (frame, outputs), self._within(frame)))
        return outputs

    def _begin(self, lockstep: Lockstep, name: str, args: Any, kwargs: Any) -> Frame:
        parent = self._stack[-1] if self._stack else None
        counts = parent.counts if parent else Counter()
        index = counts[name]
        counts[name] += 1
        if self._side == REFERENCE and getattr(self.modules.get(name), "inplace", False) is True:
            # What it is about to overwrite is needed once it has run.
            args, kwargs = mapped(args, Tensor.clone), mapped(kwargs, Tensor.clone)
        frame = Frame(
            name, index, args, kwargs, Randomness.now(), versions_of((args, kwargs)), parent=parent
        )
        within = self._within(parent)
        lockstep.post(self._side, SideEvent(("begin", name, index), frame, within))
        self._stack.append(frame)
        return frame

    def _within(self, frame: Frame | None) -> tuple[Hashable, ...]:
        """Return the keys of the ends of a call and of those around it, outermost first."""
        keys = []
        while frame is not None:
            keys.append(frame.end)
            frame = frame.parent
        return tuple(reversed(keys))


def versions_of(value: Any) -> tuple[int, ...]:
    """Return how often each tensor in a value has been changed in place."""
    return tuple(one._version for _, one in tensors_of(value))


def dtypes_of(value: Any) -> tuple[torch.dtype, ...]:
    """Return the dtype of each tensor in a value."""
    return tuple(one.dtype for _, one in tensors_of(value))
