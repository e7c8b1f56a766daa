"""Compares the tensors of each call, and runs its operations in a candidate's precision."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mp_agent.plan.comparison.model import TensorError
from mp_agent.plan.execution.calls import Calls, Finished, Frame, dtypes_of, versions_of
from mp_agent.plan.execution.errors import (
    Pair,
    error_between,
    inexact,
    mapped,
    opaque_type,
    relative_error,
    tensors_of,
)
from mp_agent.plan.execution.lockstep import (
    CANDIDATE,
    REFERENCE,
    Lockstep,
    Randomness,
    SideEvent,
)
from mp_agent.plan.execution.precision import LOSS
from mp_agent.plan.precision_plan import NumberFormat


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
        (output,) = inexact(outputs).values()
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
    pairs = zip(inexact(reference).values(), inexact(candidate).values(), strict=True)
    return any(bool((one.isfinite() & ~other.isfinite()).any()) for one, other in pairs)


def _parameters(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters(recurse=False))


def _no_child(module: str) -> Any:
    raise NotReplayed("it calls other modules")


@contextmanager
def _running(calls: Calls, name: str) -> Iterator[None]:
    precision = calls.precision
    kept = name == LOSS and LOSS in precision.kept
    with nullcontext() if kept else precision.running(replay=True):
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


@dataclass(slots=True, eq=False)
class MeasuredCall:
    """What has been measured of a call so far; `report.model.CallComparison` explains it."""

    order: int
    module: str
    depth: int
    input_error: float = 0.0
    input_nonfinite: bool = False
    output: TensorError | None = None
    own: TensorError | None = None
    own_missing: str = ""
    operand_underflow_ratio: float | None = None
    gradient: TensorError | None = None
    gradient_own: TensorError | None = None
    inputs: Inputs | None = None
    """Inputs for the backward of a module without others in it, until its gradient is known."""


class Observer:
    """Compares pairs of events. All of it runs on the reference's thread."""

    def __init__(self, number_format: NumberFormat, loss_scale: float, on_call: Callable[[], None]):
        self.calls: list[MeasuredCall] = []
        self.parameters: dict[str, TensorError] = {}
        self.outputs: list[tuple[Any, TensorError]] = []
        """Outputs of the model itself: the reference's, and their error."""
        self._format = number_format
        self._loss_scale = loss_scale
        self._on_call = on_call
        self._begun = 0
        self._lockstep: Lockstep | None = None
        self._reference: Calls | None = None
        self._candidate: Calls | None = None

    def attach(self, lockstep: Lockstep, reference: Calls, candidate: Calls) -> None:
        """Take the sides, and stop both at the gradient of each parameter."""
        self._lockstep, self._reference, self._candidate = lockstep, reference, candidate
        for index, calls in ((REFERENCE, reference), (CANDIDATE, candidate)):
            for name, parameter in calls.model.named_parameters():
                if parameter.requires_grad:
                    hook = self._parameter_hook(index, name)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def compare(self, key: Hashable, reference: Any, candidate: Any) -> None:
        """Compare a pair of events."""
        kind = key[0] if isinstance(key, tuple) else ""
        with torch.no_grad():
            if kind == "begin":
                self._begin(reference, candidate)
            elif kind == "end":
                self._end(reference[0], reference[1], candidate[0], candidate[1])
            elif kind == "gradient":
                self._gradient(reference[0], reference[1], candidate[1])
            else:
                error = error_between(
                    [(reference[1], candidate[1])], self._format, self._loss_scale
                )
                self.parameters[reference[0]] = error

    def _begin(self, reference: Frame, candidate: Frame) -> None:
        parent = reference.parent
        depth = parent.measured.depth + 1 if parent and parent.measured else 0
        measured = MeasuredCall(self._begun, reference.module, depth)
        self._begun += 1
        pairs = _pairs((reference.args, reference.kwargs), (candidate.args, candidate.kwargs))
        measured.input_error, measured.input_nonfinite = relative_error(pairs)
        reference.measured = candidate.measured = measured

    def _end(self, frame: Frame, outputs: Any, candidate: Frame, candidate_outputs: Any) -> None:
        measured: MeasuredCall | None = frame.measured
        if frame.parent is not None:
            frame.parent.children.append(
                Finished(
                    frame.module,
                    mapped(outputs, Tensor.detach),
                    versions_of(outputs),
                    dtypes_of(candidate_outputs),
                    Randomness.now(),
                )
            )
        if measured is None or measured is not candidate.measured:
            return
        measured.output = error_between(_pairs(outputs, candidate_outputs), self._format)
        self._measure_own(measured, frame, candidate, outputs)
        self.calls.append(measured)
        if frame.module == "":
            kept = mapped(outputs, Tensor.detach)
            self.outputs.append((kept, measured.output))
        self._hook_gradients(measured, frame, outputs, candidate_outputs)
        self._on_call()

    def _measure_own(
        self, measured: MeasuredCall, frame: Frame, candidate: Frame, outputs: Any
    ) -> None:
        assert self._candidate is not None
        inputs = inputs_of(frame, candidate)
        try:
            own = own_outputs(self._candidate, frame.module, inputs, frame.children)
            measured.own = error_between(_pairs(outputs, own), self._format)
        except NotReplayed as reason:
            measured.own_missing = str(reason)
            return
        except Exception as error:
            measured.own_missing = f"{type(error).__name__}: {error}"
            return
        measured.operand_underflow_ratio = self._candidate.precision.operand_underflow_ratio
        if not frame.children and frame.module != LOSS and len(inexact(outputs)) == 1:
            measured.inputs = inputs

    def _hook_gradients(
        self, measured: MeasuredCall, frame: Frame, outputs: Any, candidate_outputs: Any
    ) -> None:
        """Stop both sides where the gradient of an output is known."""
        others = inexact(candidate_outputs)
        for path, one in inexact(outputs).items():
            other = others.get(path)
            if other is not None and one.requires_grad and other.requires_grad:
                key = ("gradient", measured.order, path)
                for side, tensor in ((REFERENCE, one), (CANDIDATE, other)):
                    hook = self._gradient_hook(side, key, measured)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            elif measured.inputs is not None:
                measured.inputs = None

    def _gradient_hook(
        self, side: int, key: Hashable, measured: MeasuredCall
    ) -> Callable[[Tensor], None]:
        def stop(gradient: Tensor) -> None:
            assert self._lockstep is not None
            self._lockstep.post(side, SideEvent(key, (measured, gradient)), ordered=False)

        return stop

    def _parameter_hook(self, side: int, name: str) -> Callable[[Tensor], None]:
        key = ("parameter", name)

        def stop(parameter: Tensor) -> None:
            assert self._lockstep is not None and parameter.grad is not None
            gradient = parameter.grad
            # Compared at once, and not kept until the end of the backward pass.
            parameter.grad = None
            self._lockstep.post(side, SideEvent(key, (name, gradient)), ordered=False)

        return stop

    def _gradient(self, measured: MeasuredCall, reference: Tensor, candidate: Tensor) -> None:
        if reference.shape != candidate.shape:
            return
        error = error_between([(reference, candidate)], self._format, self._loss_scale)
        if measured.gradient is None or error.relative_l2 > measured.gradient.relative_l2:
            measured.gradient = error
        inputs, measured.inputs = measured.inputs, None
        if inputs is None:
            return
        assert self._reference is not None and self._candidate is not None
        try:
            as_reference = replace(inputs, dtypes=dtypes_of((inputs.args, inputs.kwargs)))
            exact = own_gradients(self._reference, measured.module, as_reference, reference, 1.0)
            own = own_gradients(
                self._candidate, measured.module, inputs, reference, self._loss_scale
            )
        except Exception:
            # Its own backward is not known then; the gradient that reached it is.
            return
        pairs = list(zip(exact, own, strict=True))
        if pairs:
            measured.gradient_own = error_between(pairs, self._format, self._loss_scale)


def _pairs(reference: Any, candidate: Any) -> list[Pair]:
    """Return the tensors that are at the same path, in the same shape and real or complex alike."""
    others = inexact(candidate)
    return [
        (one, others[path])
        for path, one in inexact(reference).items()
        if path in others
        and others[path].shape == one.shape
        and others[path].is_complex() is one.is_complex()
    ]
