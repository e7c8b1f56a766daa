"""Runs a module's own operations in a candidate's precision, from the reference's tensors."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mp_agent.compare.execution.calls import Calls, Finished, Frame, dtypes_of, versions_of
from mp_agent.compare.execution.precision import LOSS, CandidatePrecision
from mp_agent.compare.execution.randomness import Randomness
from mp_agent.compare.measure.trees import floating, mapped, opaque_type, tensors_of


class NotReplayed(Exception):
    """A module's own operations cannot be run apart from the rest; the message says why."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a call of the reference read, and the dtypes that the candidate read it in."""

    args: Any
    kwargs: Any
    versions: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    randomness: Randomness

    def unchanged(self) -> bool:
        """Return whether nothing has been changed in place since."""
        return versions_of((self.args, self.kwargs)) == self.versions


def inputs_of(reference: Frame, candidate: Frame) -> Inputs:
    """Return the inputs of a call."""
    return Inputs(
        args=reference.args,
        kwargs=reference.kwargs,
        versions=reference.versions,
        dtypes=dtypes_of((candidate.args, candidate.kwargs)),
        randomness=reference.randomness,
    )


def own_outputs(calls: Calls, name: str, inputs: Inputs, children: Sequence[Finished]) -> Any:
    """Return what a module returns in the candidate's precision, from the reference's inputs.

    Modules within it are not run: they return what they did in the reference, so that only the
    module's own operations are left. Random numbers are those of the reference. The copy's buffers
    are as before. Raises NotReplayed, and what the module raises.
    """
    _check(inputs)
    finished = iter(children)

    def substitute(module: str) -> Any:
        child = next(finished, None)
        if child is None or child.module != module:
            raise NotReplayed("its control flow depends on the precision")
        if versions_of(child.outputs) != child.versions:
            raise NotReplayed(f"the output of {child.module} was changed in place")
        child.randomness.restore()
        return cast_as(child.outputs, child.dtypes)

    with torch.no_grad(), _undisturbed(calls, name), _running(calls, name):
        args, kwargs = cast_as((inputs.args, inputs.kwargs), inputs.dtypes)
        if _overflow((inputs.args, inputs.kwargs), (args, kwargs)):
            raise NotReplayed("its inputs are beyond the range of the format")
        inputs.randomness.restore()
        return calls.replay(name, args, kwargs, substitute)


def own_gradients(
    calls: Calls, name: str, inputs: Inputs, gradient: Tensor, scale: float
) -> list[Tensor]:
    """Return the gradients that a module without others in it computes from a given one.

    gradient: of its only output, in the reference; it is multiplied by `scale` first. In order:
    gradients of the floating-point inputs that need one, then of the module's parameters; zeros for
    what is not used. Raises NotReplayed, and what the module raises.
    """
    _check(inputs)
    parameters = [p for p in _parameters(calls.modules.get(name)) if p.requires_grad]
    with torch.enable_grad(), _undisturbed(calls, name), _running(calls, name):
        args, kwargs = cast_as((inputs.args, inputs.kwargs), inputs.dtypes)
        needing = [
            made.requires_grad_()
            for (_, one), (_, made) in zip(
                tensors_of((inputs.args, inputs.kwargs)), tensors_of((args, kwargs)), strict=True
            )
            if one.requires_grad and made.is_floating_point()
        ]
        # A leaf that needs a gradient may not be changed in place.
        args, kwargs = mapped((args, kwargs), lambda one: one.view_as(one))
        inputs.randomness.restore()
        outputs = calls.replay(name, args, kwargs, _no_child)
        (output,) = floating(outputs).values()
        sources = [*needing, *parameters]
        grad = (gradient * scale).to(output.dtype)
        found = torch.autograd.grad(output, sources, grad, allow_unused=True)
    return [
        torch.zeros_like(source) if one is None else one
        for source, one in zip(sources, found, strict=True)
    ]


def cast_as(value: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """Return a value with every tensor new and out of the graph, each in its own dtype.

    Raises NotReplayed where the numbers of tensors and dtypes differ.
    """
    if len(dtypes) != len(dtypes_of(value)):
        raise NotReplayed("it gets other inputs in the candidate")
    wanted = iter(dtypes)
    return mapped(value, lambda one: one.detach().to(next(wanted), copy=True))


def _check(inputs: Inputs) -> None:
    if not inputs.unchanged():
        raise NotReplayed("an input was changed in place")
    values = [*inputs.args, *inputs.kwargs.values()]
    modules = (value for value in values if not isinstance(value, nn.Module))
    if opaque := next((name for value in modules if (name := opaque_type(value))), ""):
        raise NotReplayed(f"it gets a {opaque}, which may change while it is used")


def _overflow(reference: Any, candidate: Any) -> bool:
    pairs = zip(floating(reference).values(), floating(candidate).values(), strict=True)
    return any(bool((one.isfinite() & ~other.isfinite()).any()) for one, other in pairs)


def _parameters(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters(recurse=False))


def _no_child(module: str) -> Any:
    raise NotReplayed("it calls other modules")


@contextmanager
def _running(calls: Calls, name: str) -> Iterator[None]:
    precision = calls.precision
    kept = isinstance(precision, CandidatePrecision) and name == LOSS and LOSS in precision.kept
    with ExitStack() as stack:
        if not kept:
            stack.enter_context(precision.running(replay=True))
        yield


@contextmanager
def _undisturbed(calls: Calls, name: str) -> Iterator[None]:
    """Leave random numbers and the module's own buffers as they were."""
    module = calls.modules.get(name)
    held = {} if module is None else module._buffers
    before, buffers = Randomness.now(), dict(held)
    # Others take their places: restoring values in place would be a change to the backward pass.
    held.update({key: b if b is None else b.detach().clone() for key, b in buffers.items()})
    try:
        yield
    finally:
        before.restore()
        held.update(buffers)
