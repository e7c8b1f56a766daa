"""What is seen only in the forward pass of a step: by instruments, and when it begins."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.phases import StepParts


class Instrument:
    """Measures families that are not of parameters, in the first passes of a sampled step.

    The methods are in the order in which they are called. One that is not overridden does nothing.
    """

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the layers, by family; the same object while they are the same."""
        return {}

    def begin(self, model: nn.Module | None) -> None:
        """Prepare the model for its next forward pass."""

    def end(self, step: OpenStep) -> None:
        """Leave the model as it was; add what is known of its forward pass to the step."""

    def backward_ended(self, step: OpenStep) -> None:
        """Add to the step what was measured in the backward pass after that."""

    def finish(self, step: OpenStep) -> None:
        """Add to the step, which is about to end, what was measured in both passes."""

    def close(self) -> None:
        """Leave the model as it was."""


Instruments = Mapping[str, Instrument]
"""By what they measure, for the log of failures."""


def overriding(instruments: Instruments, method: str) -> Instruments:
    """Return those that have something to do in a method; the others need not be called."""
    nothing = getattr(Instrument, method)
    return {
        what: each for what, each in instruments.items() if getattr(type(each), method) != nothing
    }


Run = Callable[..., None]
"""`Shield.run`: a kind of failure, a function, and its arguments."""


class _ForwardHook:
    """A pre-hook; a copy of the module, pickled or deep, has one that does nothing instead.

    Where `torch.compile` traces it, it leaves nothing in the graph, and is not called.
    """

    __slots__ = ("_parts", "_run")

    def __init__(self, run: Run, parts: StepParts) -> None:
        self._run, self._parts = run, parts

    def __call__(self, module: object, inputs: object) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return
        if self._parts.awaits_forward and torch.is_grad_enabled():
            self._run("forward", self._parts.forward_begins)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library alone: what is saved must load where mp_agent is not installed.
        return getattr, (nullcontext(), "__exit__")


class ForwardStart:
    """Keeps one hook on the model, none on what it contains: a compiled model runs it, too."""

    def __init__(self, run: Run, parts: StepParts) -> None:
        self._hook = _ForwardHook(run, parts)
        self._model: weakref.ref[nn.Module] | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module | None) -> None:
        """Have the hook on this model, if it is not; of a scripted one no forward is seen."""
        if self._model is not None and self._model() is model and self._handle is not None:
            return
        self.close()
        if model is None or isinstance(model, torch.jit.ScriptModule):
            return
        self._model = weakref.ref(model)
        self._handle = nn.Module.register_forward_pre_hook(model, self._hook, prepend=True)

    def close(self) -> None:
        """Remove the hook."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
