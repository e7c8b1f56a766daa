"""One comparison: the reference and a candidate, side by side, from the same random numbers."""

import sys
from collections.abc import Callable, Set
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mp_agent.compare.execution.calls import Calls
from mp_agent.compare.execution.copies import copy_of
from mp_agent.compare.execution.lockstep import CANDIDATE, REFERENCE, Lockstep
from mp_agent.compare.execution.observer import MeasuredCall, Observer
from mp_agent.compare.execution.precision import CandidatePrecision, Precision, ReferencePrecision
from mp_agent.compare.execution.task import Task, fp32_products, in_plain_thread, plain_thread
from mp_agent.compare.formats import Candidate, NumberFormat
from mp_agent.compare.measure.errors_between import error_between
from mp_agent.compare.measure.trees import floating
from mp_agent.compare.report.tensor_error import TensorError


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one comparison measured."""

    calls: tuple[MeasuredCall, ...]
    parameters: dict[str, TensorError]
    outputs: tuple[TensorError, ...]
    """Of the model itself, one for each time that it is called."""
    reference_outputs: tuple[Any, ...]
    reference_loss: float | None
    candidate_loss: float | None
    notes: tuple[str, ...]
    failure: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What a candidate's run without comparing its modules gave."""

    outputs: tuple[TensorError, ...]
    loss: float
    gradients_finite: bool


def compare_side_by_side(
    task: Task,
    reference: NumberFormat,
    candidate: Candidate,
    kept: Set[str] = frozenset(),
    on_call: Callable[[], None] = lambda: None,
) -> Measured:
    """Run both and compare each module as it runs.

    kept: modules of the candidate that stay in FP32. on_call is called after each call of a module.
    Random numbers are as before. Raises what the reference raises.
    """
    observer = Observer(candidate.format, task.loss_scale, on_call)
    lockstep = Lockstep(observer.compare)
    precisions: tuple[Precision, Precision] = (
        ReferencePrecision(reference),
        CandidatePrecision(candidate, task.device, kept),
    )
    losses: dict[int, float] = {}
    with ExitStack() as stack:
        stack.enter_context(fp32_products())
        stack.enter_context(uncompiled())
        sides = []
        for index, precision in enumerate(precisions):
            copied = copy_of(task.model, precision.dtype_of)
            sides.append(Calls(index, copied, precision, lockstep))
            stack.callback(sides[-1].close)
        observer.attach(lockstep, *sides)

        def body(index: int, scale: float) -> Callable[[], None]:
            def run() -> None:
                with plain_thread(task.device):
                    losses[index] = task.run(sides[index], scale)

            return run

        error = lockstep.run(body(REFERENCE, 1.0), body(CANDIDATE, task.loss_scale))
    notes = [f"control flow depends on the precision: {text}" for text in lockstep.diverged[:3]]
    if (more := len(lockstep.diverged) - 3) > 0:
        notes.append(f"and so at {more} more places")
    return Measured(
        calls=tuple(observer.calls),
        parameters=observer.parameters,
        outputs=tuple(error for _, error in observer.outputs),
        reference_outputs=tuple(outputs for outputs, _ in observer.outputs),
        reference_loss=losses.get(REFERENCE),
        candidate_loss=losses.get(CANDIDATE),
        notes=tuple(notes),
        failure="" if error is None else f"{type(error).__name__}: {error}",
    )


def run_alone(
    task: Task, candidate: Candidate, kept: Set[str], reference_outputs: tuple[Any, ...]
) -> Trial:
    """Run a candidate alone, and compare what the model returns with what the reference did.

    Raises what the candidate raises.
    """
    outputs: list[TensorError] = []
    finite = [True]
    losses: list[float] = []

    def watch(module: nn.Module, args: Any, value: Any) -> None:
        if len(outputs) < len(reference_outputs):
            known, made = floating(reference_outputs[len(outputs)]), floating(value)
            pairs = [(known[path], made[path]) for path in known if path in made]
            with torch.no_grad():
                outputs.append(error_between(pairs, candidate.format))

    def check(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        finite[0] = finite[0] and gradient is not None and bool(gradient.isfinite().all())

    precision = CandidatePrecision(candidate, task.device, kept)
    copied = copy_of(task.model, precision.dtype_of)
    calls = Calls(CANDIDATE, copied, precision, None)
    copied.register_forward_hook(watch)
    for parameter in copied.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
    try:
        with fp32_products(), uncompiled():
            in_plain_thread(task.device, lambda: losses.append(task.run(calls, task.loss_scale)))
    finally:
        calls.close()
    return Trial(tuple(outputs), losses[0], finite[0])


def uncompiled() -> Any:
    """Return a context in which functions that torch compiles run as they are written."""
    # The compiler takes seconds to import; without it, there is no compiled function.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
