"""Run scope: gradients, unscaled and before clipping, of steps that were not skipped."""

from collections.abc import Mapping

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.catalog.thresholds import bound_label
from mp_agent.records.merged import RunView, StepTransition

_NORM_BOUNDS = ("grad_norm_high", "grad_norm_extreme")


def _judged_norm(run: RunView) -> Reading:
    return None if run.judged is None else run.judged.grad_norm


def _judged_abs_max(run: RunView) -> Reading:
    return None if run.judged is None else run.judged.get("abs_max")


def _judged_zero_ratio(run: RunView) -> Reading:
    if run.judged is None or not run.judged.get("elements"):
        return None
    return run.judged.values["zero_elements"] / run.judged.values["elements"]


def _finite(run: RunView) -> Reading:
    if run.last is None or "nan_elements" not in run.last.values:
        return None
    return float(run.last.gradient_nonfinite_elements == 0.0)


def _bounds(thresholds: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    return tuple((bound_label(thresholds[name]),) for name in _NORM_BOUNDS)


def _exceeded(change: StepTransition) -> Reading:
    norm = change.step.grad_norm
    if norm is None or not change.step.gradients_judged:
        return None
    limits = [change.thresholds[name] for name in _NORM_BOUNDS]
    return {(bound_label(limit),): float(norm > limit) for limit in limits}


def _nonfinite_update(change: StepTransition) -> Reading:
    step = change.step
    return float(not step.skipped and step.gradient_nonfinite_elements > 0)


def _clipped(change: StepTransition) -> Reading:
    coefficient = change.step.clip_coefficient
    return float(coefficient is not None and coefficient < 1.0 and not change.step.skipped)


GRADIENT_METRICS = (
    Metric(
        name="mp_agent.grad.norm",
        unit="{norm}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Global L2 norm of the unscaled gradients before clipping; last step that was neither "
        "skipped nor non-finite.",
        read=_judged_norm,
    ),
    Metric(
        name="mp_agent.grad.abs_max",
        unit="{gradient}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Largest gradient magnitude of the same step as the norm.",
        read=_judged_abs_max,
    ),
    Metric(
        name="mp_agent.grad.zero",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Share of gradient elements that are exactly zero, same step as the norm.",
        read=_judged_zero_ratio,
    ),
    Metric(
        name="mp_agent.grad.finite",
        unit="",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="1 if all gradients of the last step were finite, else 0.",
        read=_finite,
    ),
    Metric(
        name="mp_agent.grad.norm.window_max",
        unit="{norm}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Largest gradient norm over the last window_seconds.",
        read=lambda run: run.norm_window_max,
    ),
    Metric(
        name="mp_agent.grad.norm.window_min",
        unit="{norm}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Smallest gradient norm over the last window_seconds.",
        read=lambda run: run.norm_window_min,
    ),
    Metric(
        name="mp_agent.grad.norm.exceeded.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("bound",),
        label_values=_bounds,
        help="Steps whose gradient norm was above the bound.",
        count=_exceeded,
    ),
    Metric(
        name="mp_agent.grad.nonfinite.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Steps with at least one NaN or Inf gradient element, skipped or not.",
        count=lambda change: float(change.step.gradient_nonfinite_elements > 0),
    ),
    Metric(
        name="mp_agent.grad.nan.elements",
        unit="{element}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Gradient elements that were NaN.",
        count=lambda change: change.step.get("nan_elements") or 0.0,
    ),
    Metric(
        name="mp_agent.grad.inf.elements",
        unit="{element}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Gradient elements that were +Inf or -Inf.",
        count=lambda change: change.step.get("inf_elements") or 0.0,
    ),
    Metric(
        name="mp_agent.nonfinite.updates",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Steps on which the optimizer was stepped with non-finite gradients.",
        count=_nonfinite_update,
    ),
    Metric(
        name="mp_agent.clip.max_norm",
        unit="{norm}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Limit given to gradient clipping.",
        read=lambda run: None if run.last is None else run.last.get("clip_max_norm"),
    ),
    Metric(
        name="mp_agent.clip.coefficient",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Factor that clipping applied to the gradients: 1 when it left them alone.",
        read=lambda run: None if run.judged is None else run.judged.clip_coefficient,
    ),
    Metric(
        name="mp_agent.clipped.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Steps on which clipping shrank the gradients.",
        count=_clipped,
    ),
)
