"""Run scope: gradient norms compared with the run's own usual ones, and as seen by clipping."""

from collections.abc import Mapping

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.catalog.metrics.gradients.optimizers import OPTIMIZER
from mp_agent.catalog.thresholds import level_label
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import RunView

_HIGH_BOUNDS = ("grad_norm_high", "grad_norm_extreme")
_LOW_BOUNDS = ("grad_norm_low", "grad_norm_very_low", "grad_norm_vanished")


def _labels(optimizer: str) -> tuple[str, ...]:
    return (optimizer,) if optimizer else ()


def _usual(run: RunView) -> Reading:
    return {_labels(name): norms.usual for name, norms in run.health.norms.items()}


def _peak(run: RunView) -> Reading:
    return {_labels(name): norms.peak for name, norms in run.health.norms.items()}


def _below(run: RunView) -> Reading:
    main = run.health.norms.get("")
    return {(name,): float(steps) for name, steps in main.below.items()} if main else None


def _bounds(thresholds: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    return tuple((level_label(name),) for name in _HIGH_BOUNDS)


def _exploded(change: StepTransition) -> Reading:
    return _above(change, change.exploded)


def _unclipped(change: StepTransition) -> Reading:
    """Leave out what clipping shrank; that is known of the main optimizer alone."""
    coefficient = change.step.clip_coefficient
    clipped = coefficient is not None and coefficient < 1.0
    norms = {name: norm for name, norm in change.exploded.items() if name or not clipped}
    return _above(change, norms)


def _above(change: StepTransition, norms: Mapping[str, float]) -> Reading:
    if not norms:
        return None
    largest = max(norms.values())
    return {(level_label(name),): float(largest > change.thresholds[name]) for name in _HIGH_BOUNDS}


NORM_METRICS = (
    Metric(
        name="mp_agent.grad.norm.usual",
        unit="{norm}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        optional_labels=OPTIMIZER,
        help="Median of the last 128 gradient norms, without those that exploded.",
        read=_usual,
    ),
    Metric(
        name="mp_agent.grad.norm.usual.peak",
        unit="{norm}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        optional_labels=OPTIMIZER,
        help="Largest value of mp_agent_grad_norm_usual so far.",
        read=_peak,
    ),
    Metric(
        name="mp_agent.grad.norm.below.steps",
        unit="{step}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        labels=("limit",),
        thresholds=_LOW_BOUNDS,
        help="Consecutive steps whose gradient norm was below the threshold that `limit` names.",
        read=_below,
    ),
    Metric(
        name="mp_agent.grad.exploded.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("bound",),
        label_values=_bounds,
        thresholds=(*_HIGH_BOUNDS, "grad_norm_growth"),
        help="Steps whose gradient norm, for any optimizer, was above the bound and far above "
        "its own usual value.",
        count=_exploded,
    ),
    Metric(
        name="mp_agent.grad.exploded.unclipped.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("bound",),
        label_values=_bounds,
        thresholds=(*_HIGH_BOUNDS, "grad_norm_growth"),
        help="Such steps on which clipping is not known to have reduced the gradients.",
        count=_unclipped,
    ),
    Metric(
        name="mp_agent.clip.scaled.steps",
        unit="{step}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Consecutive steps whose clipping saw gradients that were still multiplied by the "
        "loss scale; 0 if it runs after unscale_.",
        read=lambda run: float(run.health.scaled_clip_steps),
    ),
)
