"""Runs the sides of a comparison on copies that share the model's weights."""

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mp_agent.errors import CompareError
from mp_agent.plan.comparison.model import TensorError
from mp_agent.plan.execution.calls import (
    Calls,
    Task,
    fp32_products,
    in_plain_thread,
    plain_thread,
)
from mp_agent.plan.execution.errors import error_between, inexact, tensors_of
from mp_agent.plan.execution.lockstep import CANDIDATE, REFERENCE, Lockstep
from mp_agent.plan.execution.observer import MeasuredCall, Observer
from mp_agent.plan.execution.precision import Precision, counterpart
from mp_agent.plan.precision_plan import Candidate, NumberFormat

DtypeOf = Callable[[str], "torch.dtype"]
"""Returns the dtype of a module's floating-point parameters and buffers, by its name."""

_COMPILED = "OptimizedModule"
_SHARDED = ("FullyShardedDataParallel", "DTensor", "DeepSpeedEngine")
_WRAPPERS = ("DistributedDataParallel", "DataParallel")


def unwrapped(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model within wrappers that change no numbers, and notes on what was omitted.

    Raises CompareError for a model whose parameters are sharded or not there.
    """
    notes = []
    while (kind := type(model).__name__) in (*_WRAPPERS, _COMPILED):
        if kind == _COMPILED:
            notes.append("the model is compiled; it was compared uncompiled")
        model = getattr(model, "_orig_mod" if kind == _COMPILED else "module")
    for name, module in model.named_modules():
        if type(module).__name__ in _SHARDED:
            raise CompareError(
                f"model: {name or 'it'} is a {type(module).__name__}, whose "
                "parameters are sharded; compare the model before it is wrapped"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CompareError(f"model: {name or 'it'} is a ScriptModule, which cannot be traced")
        if type(module).__name__ == _COMPILED or module._compiled_call_impl is not None:
            notes.append(f"{name or 'the model'} is compiled; it was compared uncompiled")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor).__name__ in _SHARDED:
            raise CompareError(f"model: {name} is a {type(tensor).__name__}, which is sharded")
        if torch.nn.parameter.is_lazy(tensor):
            raise CompareError(f"model: {name} is not initialized; call the model once before")
        if tensor.is_meta:
            raise CompareError(f"model: {name} is on the meta device and has no values")
    return model, tuple(notes)


def devices_of(model: nn.Module, batch: Any) -> list[torch.device]:
    """Return the devices of the tensors of a model and a batch, each once."""
    tensors = [*model.parameters(), *model.buffers(), *(one for _, one in tensors_of(batch))]
    return list(dict.fromkeys(one.device for one in tensors))


def batches_of(batch: Any, steps: int) -> tuple[Any, ...]:
    """Return the batches that a value stands for: of a loader the first ones, which may be none."""
    if not isinstance(batch, DataLoader | Iterator):
        return (batch,)
    return tuple(islice(iter(batch), steps))


def first_batch(batch: Any) -> Any:
    """Return the batch, of a loader its first. Raises CompareError where there is none."""
    if not (batches := batches_of(batch, 1)):
        raise CompareError(f"batch: the {type(batch).__name__} is empty")
    return batches[0]


def copy_of(model: nn.Module, dtype_of: DtypeOf) -> nn.Module:
    """Return a copy with its own gradients, buffers, hooks and mode; weights share storage.

    A weight is copied only where `dtype_of` asks for another dtype. One that several modules share
    gets the widest dtype that one of them asks for. Raises CompareError for a model that Python
    cannot copy.
    """
    memo: dict[int, Any] = {}
    dtypes = _dtypes(model, dtype_of)
    for parameter in model.parameters():
        made = nn.Parameter(_cast(parameter, dtypes), parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = made
    for buffer in model.buffers():
        cast = _cast(buffer, dtypes)
        memo[id(buffer)] = cast.clone() if cast.data_ptr() == buffer.data_ptr() else cast
    try:
        for module in reversed(list(model.modules())):
            if type(module).__name__ == _COMPILED:
                memo[id(module)] = deepcopy(module._orig_mod, memo)
        copied = deepcopy(model, memo)
    except Exception as error:
        raise CompareError(f"model: {type(model).__name__} cannot be copied: {error}") from error
    for module in copied.modules():
        module._compiled_call_impl = None
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            # A cache of keys and values grows while it is used; training needs none.
            config.use_cache = False
    return copied


def _dtypes(model: nn.Module, dtype_of: DtypeOf) -> dict[int, torch.dtype]:
    """Return the dtype of each floating-point or complex parameter and buffer, by identity."""
    found: dict[int, torch.dtype] = {}
    for name, module in model.named_modules():
        wanted = dtype_of(name)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point() or tensor.is_complex():
                own = counterpart(tensor, wanted)
                found[id(tensor)] = torch.promote_types(own, found.get(id(tensor), own))
    return found


def _cast(tensor: Tensor, dtypes: dict[int, torch.dtype]) -> Tensor:
    dtype = dtypes.get(id(tensor))
    return tensor.detach() if dtype is None else tensor.detach().to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one comparison measured."""

    calls: tuple[MeasuredCall, ...]
    parameters: dict[str, TensorError]
    outputs: tuple[TensorError, ...]
    """Errors of the model's own outputs, one for each time that it is called."""
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
    precisions = (
        Precision(Candidate(reference.name, reference), task.device),
        Precision(candidate, task.device, kept),
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
            known, made = inexact(reference_outputs[len(outputs)]), inexact(value)
            pairs = [(known[path], made[path]) for path in known if path in made]
            with torch.no_grad():
                outputs.append(error_between(pairs, candidate.format))

    def check(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        finite[0] = finite[0] and gradient is not None and bool(gradient.isfinite().all())

    precision = Precision(candidate, task.device, kept)
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
