"""Compares a model in two precisions, module by module."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import nn

from mp_agent.errors import CompareError
from mp_agent.plan.comparison.model import (
    TOLERANCE,
    CallComparison,
    CandidateComparison,
    KeepResult,
    ParameterComparison,
    PrecisionReport,
    Verdict,
    role_of,
    verdict_of,
)
from mp_agent.plan.comparison.origins import origins_of
from mp_agent.plan.comparison.search import Found, find_kept
from mp_agent.plan.execution.calls import Task, loss_of
from mp_agent.plan.execution.observer import MeasuredCall
from mp_agent.plan.execution.precision import LOSS
from mp_agent.plan.execution.session import (
    Measured,
    compare_side_by_side,
    devices_of,
    first_batch,
    run_alone,
    unwrapped,
)
from mp_agent.plan.precision_plan import (
    DEFAULT_NAMES,
    Candidate,
    NumberFormat,
    candidates_of,
    reference_of,
)
from mp_agent.report.content import picked

SEARCH_TRIALS = 40

Progress = Callable[[str, str, int], None]
"""Gets a candidate, what is done with it, and how many calls or trials of that are over."""


@dataclass(frozen=True, slots=True)
class _Limits:
    reference: NumberFormat
    tolerance: float
    search_trials: int
    progress: Progress


def compare(
    model: nn.Module,
    batch: Any,
    loss: Any,
    *,
    dtypes: Iterable[object] = DEFAULT_NAMES,
    reference: object = "fp32",
    tolerance: float = TOLERANCE,
    loss_scale: float = 1.0,
    search_trials: int = SEARCH_TRIALS,
    progress: Progress = lambda candidate, stage, count: None,
) -> PrecisionReport:
    """Compare the candidates one after the other; `mp_agent.compare_precision` describes it."""
    _check(model, tolerance, loss_scale, search_trials)
    candidates = candidates_of(dtypes)
    limits = _Limits(reference_of(reference), tolerance, search_trials, progress)
    inner, notes = unwrapped(model)
    batch = first_batch(batch)
    task = Task(inner, batch, loss_of(loss), _device(inner, batch), float(loss_scale))
    # Tensors that are made in inference mode cannot be trained with.
    with torch.inference_mode(False):
        compared = tuple(_compare_one(task, candidate, limits) for candidate in candidates)
    return PrecisionReport(
        model=type(inner).__name__,
        parameters=sum(parameter.numel() for parameter in inner.parameters()),
        reference=limits.reference.name,
        tolerance=tolerance,
        loss_scale=float(loss_scale),
        environment={"torch": torch.__version__, "device": _device_name(task.device)},
        candidates=compared,
        notes=notes,
    )


def _check(model: Any, tolerance: float, loss_scale: float, search_trials: int) -> None:
    if not isinstance(model, nn.Module):
        raise CompareError(f"model: {type(model).__name__} is not a torch.nn.Module")
    for name, value in (("tolerance", tolerance), ("loss_scale", loss_scale)):
        if not (isfinite(value) and value > 0):
            raise CompareError(f"{name}: {value!r} is not a positive number")
    if search_trials < 0:
        raise CompareError(f"search_trials: {search_trials!r} is negative")


def _device(model: nn.Module, batch: Any) -> torch.device:
    devices = devices_of(model, batch)
    if len({device.type for device in devices}) > 1:
        raise CompareError(f"model: is on several kinds of device: {', '.join(map(str, devices))}")
    return devices[0] if devices else torch.device("cpu")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _compare_one(task: Task, candidate: Candidate, limits: _Limits) -> CandidateComparison:
    measured = _measure(task, candidate, limits, frozenset(), "comparing modules")
    calls, parameters = _calls(measured, candidate, task.model), _parameters(measured)
    verdict = _verdict(measured, limits.tolerance)
    origins = origins_of(calls, parameters, candidate.format.unit_roundoff)
    keep = None
    if not verdict.passed and not measured.failure and limits.search_trials:
        keep = _search(task, candidate, limits, measured, calls)
    return CandidateComparison(
        name=candidate.name,
        meaning=candidate.meaning,
        unit_roundoff=candidate.format.unit_roundoff,
        verdict=verdict,
        output=max(measured.outputs, key=lambda one: one.mean_abs, default=None),
        reference_loss=measured.reference_loss,
        candidate_loss=measured.candidate_loss,
        calls=calls,
        parameters=parameters,
        origins=origins,
        keep=keep,
        notes=measured.notes,
        failure=measured.failure,
    )


def _measure(
    task: Task, candidate: Candidate, limits: _Limits, kept: frozenset[str], stage: str
) -> Measured:
    count = 0

    def on_call() -> None:
        nonlocal count
        count += 1
        limits.progress(candidate.name, stage, count)

    limits.progress(candidate.name, stage, 0)
    return compare_side_by_side(task, limits.reference, candidate, kept, on_call)


def _verdict(measured: Measured, tolerance: float) -> Verdict:
    return verdict_of(
        measured.outputs,
        (measured.reference_loss, measured.candidate_loss),
        not any(error.nonfinite_ratio > 0 for error in measured.parameters.values()),
        tolerance,
        measured.failure,
    )


def _search(
    task: Task,
    candidate: Candidate,
    limits: _Limits,
    measured: Measured,
    calls: Sequence[CallComparison],
) -> KeepResult:
    """Search for modules to keep in FP32, and compare once more with them kept."""
    count = 0

    def passes(kept: frozenset[str]) -> bool:
        nonlocal count
        limits.progress(candidate.name, "searching what to keep in FP32", count)
        count += 1
        try:
            trial = run_alone(task, candidate, kept, measured.reference_outputs)
        except Exception:
            # Some modules cannot be mixed; a set that does not run is none to keep.
            return False
        losses = (measured.reference_loss, trial.loss)
        return verdict_of(trial.outputs, losses, trial.gradients_finite, limits.tolerance).passed

    found: Found = find_kept(_ranked(calls), passes, limits.search_trials, frozenset({"", LOSS}))
    if not found.passes:
        return KeepResult(kept=(), found=False, minimal=False, trials=found.trials, verdict=None)
    again = _measure(task, candidate, limits, frozenset(found.kept), "proving what is kept")
    return KeepResult(
        kept=found.kept,
        found=True,
        minimal=found.minimal,
        trials=found.trials,
        verdict=_verdict(again, limits.tolerance),
        calls=_calls(again, candidate, task.model),
    )


def _ranked(calls: Sequence[CallComparison]) -> list[str]:
    """Return the modules that lose anything of their own, the most suspect first."""
    scores: dict[str, tuple[int, float]] = {}
    for call in calls:
        own = call.own or call.output
        score = (
            2 if call.own_nonfinite_finite_inputs else int(own.nonfinite_ratio > 0),
            max(own.relative_l2, own.underflow_ratio),
        )
        if call.module and own.elements:
            scores[call.module] = max(score, scores.get(call.module, (0, 0.0)))
    return sorted(scores, key=lambda name: scores[name], reverse=True)


def _calls(
    measured: Measured, candidate: Candidate, model: nn.Module
) -> tuple[CallComparison, ...]:
    modules = dict(model.named_modules())
    return tuple(
        _call(one, "loss" if one.module == LOSS else type(modules[one.module]).__name__, candidate)
        for one in measured.calls
    )


_AS_MEASURED = (
    *("order", "module", "depth", "input_error", "input_nonfinite", "output", "own", "own_missing"),
    *("operand_underflow_ratio", "gradient", "gradient_own"),
)


def _call(one: MeasuredCall, kind: str, candidate: Candidate) -> CallComparison:
    assert one.output is not None
    roundoff = candidate.format.unit_roundoff
    return CallComparison(
        kind=kind,
        own_nonfinite_finite_inputs=one.own is not None and one.own.nonfinite_ratio > 0,
        role=role_of(one.input_error, one.input_nonfinite, one.output, one.own, roundoff),
        **picked(one, *_AS_MEASURED),
    )


def _parameters(measured: Measured) -> tuple[ParameterComparison, ...]:
    return tuple(
        ParameterComparison(name=name, gradient=error)
        for name, error in measured.parameters.items()
    )
