"""Compares a model in two precisions, and finds the modules with which a candidate passes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import nn

from mp_agent.compare.execution.calls import Task, loss_of
from mp_agent.compare.execution.errors import tensors_of
from mp_agent.compare.execution.observer import MeasuredCall
from mp_agent.compare.execution.precision import LOSS
from mp_agent.compare.execution.session import Measured, compare_side_by_side, run_alone, unwrapped
from mp_agent.compare.formats import (
    DEFAULT_NAMES,
    Candidate,
    NumberFormat,
    candidates_of,
    reference_of,
)
from mp_agent.compare.report.model import (
    CallComparison,
    CandidateComparison,
    KeepResult,
    ParameterComparison,
    PrecisionReport,
    Verdict,
    role_of,
)
from mp_agent.compare.report.origins import origins_of
from mp_agent.compare.report.text import verdict_of
from mp_agent.errors import CompareError

Passes = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    kept: tuple[str, ...]
    passes: bool
    minimal: bool
    """Whether no single one can be left out; False when the trials ran out before."""
    trials: int


class _Exhausted(Exception):
    """The trials ran out."""


def find_kept(
    ranked: Sequence[str], passes: Passes, trials_max: int, last_resort: frozenset[str]
) -> Found:
    """Return a set of modules with which a candidate passes.

    ranked: names of modules, the most suspect first; keeping one keeps all within it. The shortest
    prefix that passes is found by doubling and bisection, then reduced by delta debugging (Zeller
    and Hildebrandt 2002: complements of ever smaller parts), until no single module can be left
    out; then each module is replaced by those within it, where that still passes. last_resort is
    tried when all of `ranked` fail. The set that is returned has passed a trial.
    """
    search = _Search(passes, trials_max)
    best: tuple[str, ...] = ()
    minimal = False
    try:
        best = tuple(_prefix(list(ranked), search) or ())
        if not best and search(tuple(last_resort)):
            best = tuple(sorted(last_resort))
            return Found(best, True, True, search.trials)
        if best:
            best = _reduced(best, ranked, search)
            best = _refined(best, ranked, search)
            minimal = True
    except _Exhausted:
        best = search.smallest or best
    if search.smallest is not None and not minimal:
        best = search.smallest
    return Found(best, bool(best), minimal and bool(best), search.trials)


def outermost(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names without those of modules within others of them, sorted."""
    return tuple(
        sorted(
            name
            for name in set(names)
            if not any(other != name and is_within(name, other) for other in names)
        )
    )


def is_within(name: str, other: str) -> bool:
    """Return whether a module is within another one, by name."""
    return name.startswith(f"{other}.") if other else not name.startswith("(")


class _Search:
    """Counts and remembers trials."""

    def __init__(self, passes: Passes, trials_max: int) -> None:
        self.trials = 0
        self.smallest: tuple[str, ...] | None = None
        self._passes = passes
        self._trials_max = trials_max
        self._known: dict[tuple[str, ...], bool] = {}

    def __call__(self, names: Sequence[str]) -> bool:
        key = outermost(names)
        if key not in self._known:
            if self.trials >= self._trials_max:
                raise _Exhausted
            self.trials += 1
            self._known[key] = self._passes(frozenset(key))
        passed = self._known[key]
        if passed and (self.smallest is None or len(key) <= len(self.smallest)):
            self.smallest = key
        return passed


def _prefix(ranked: list[str], search: _Search) -> list[str] | None:
    """Return the shortest prefix that passes, as far as passing is monotone; None for none."""
    low, high = 0, 1
    while high < len(ranked) and not search(ranked[:high]):
        low, high = high, 2 * high
    high = min(high, len(ranked))
    if not ranked or not search(ranked[:high]):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search(ranked[:middle]) else (middle, high)
    return ranked[:high]


def _reduced(names: Sequence[str], ranked: Sequence[str], search: _Search) -> tuple[str, ...]:
    """Leave out parts that are not needed, ever smaller, until no single one can be."""
    # Modules with the most others in them first: a small one is better kept than a large one.
    size = {name: sum(is_within(other, name) for other in ranked) for name in names}
    kept = sorted(names, key=lambda name: -size[name])
    part = max(1, len(kept) // 2)
    while True:
        removed = False
        for begin in range(0, len(kept), part):
            rest = kept[:begin] + kept[begin + part :]
            if rest and len(rest) < len(kept) and search(rest):
                kept, removed = rest, True
                break
        if removed:
            part = min(part, max(1, len(kept) // 2))
        elif part == 1:
            return outermost(kept)
        else:
            part = max(1, part // 2)


def _refined(names: Sequence[str], ranked: Sequence[str], search: _Search) -> tuple[str, ...]:
    """Replace a module by those within it, where they are enough."""
    kept = tuple(names)
    pending = list(kept)
    while pending:
        name = pending.pop()
        inner = outermost([other for other in ranked if other != name and is_within(other, name)])
        rest = tuple(other for other in kept if other != name)
        if name in kept and inner and search((*rest, *inner)):
            kept = _reduced((*rest, *inner), ranked, search)
            pending = [other for other in kept if other not in rest]
    return outermost(kept)


TOLERANCE = 1e-3
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
    tensors = [*model.parameters(), *model.buffers(), *(one for _, one in tensors_of(batch))]
    devices = list(dict.fromkeys(one.device for one in tensors))
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


def _call(one: MeasuredCall, kind: str, candidate: Candidate) -> CallComparison:
    assert one.output is not None
    return CallComparison(
        order=one.order,
        module=one.module,
        kind=kind,
        depth=one.depth,
        input_error=one.input_error,
        input_nonfinite=one.input_nonfinite,
        output=one.output,
        own=one.own,
        own_missing=one.own_missing,
        own_nonfinite_finite_inputs=one.own is not None and one.own.nonfinite_ratio > 0,
        operand_underflow_ratio=one.operand_underflow_ratio,
        role=role_of(
            one.input_error,
            one.input_nonfinite,
            one.output,
            one.own,
            candidate.format.unit_roundoff,
        ),
        gradient=one.gradient,
        gradient_own=one.gradient_own,
    )


def _parameters(measured: Measured) -> tuple[ParameterComparison, ...]:
    return tuple(
        ParameterComparison(name=name, gradient=error)
        for name, error in measured.parameters.items()
    )
