"""Metrics of the gradients of a run."""

from collections.abc import Callable, Mapping
from math import log2, sqrt
from typing import TypeVar

from mp_agent.catalog.metric import Reading, counter, gauge
from mp_agent.catalog.metrics.optimizer import Columns, Quantity, share
from mp_agent.catalog.thresholds import level_label
from mp_agent.records.merged import MergedStep, OptimizerStep, StepTransition
from mp_agent.records.views import OptimizerView, RunView

OPTIMIZER = ("optimizer",)
"""The optional label of metrics that each of several optimizers has too."""

View = TypeVar("View")


def optimizer_labels(name: str) -> tuple[str, ...]:
    """Return the labels of an optimizer; of the main one, or the whole model, there are none."""
    return (name,) if name else ()


def of_optimizers(
    main: float | None, optimizers: Mapping[str, View], read: Callable[[View], float | None]
) -> Reading:
    """Return a run's value, and those that `read` finds in the views of its optimizers."""
    if not optimizers:
        return main
    return {(): main, **{(name,): read(view) for name, view in optimizers.items()}}


def mean(values: Columns) -> float | None:
    """Return the mean of the elements."""
    return share(values, "sum", "elements")


def deviation(values: Columns) -> float | None:
    """Return the standard deviation of the elements."""
    average, squares = mean(values), share(values, "sum_squares", "elements")
    if average is None or squares is None:
        return None
    return sqrt(max(0.0, squares - average * average))


def of_fp16(column: str) -> Quantity:
    """Return what reads the share of the non-zero elements that a column counts."""
    return lambda values: share(values, column, "fp16_elements")


_FP16_MAX = 65504.0
_NORM_BOUNDS = ("grad_norm_high", "grad_norm_extreme")


def _judged(run: RunView, read: Callable[[MergedStep | OptimizerStep], float | None]) -> Reading:
    """Return what `read` finds in the last step that counts, of each optimizer."""

    def read_other(view: OptimizerView) -> float | None:
        return None if view.judged is None else read(view.judged)

    main = None if run.latest.judged is None else read(run.latest.judged)
    return of_optimizers(main, run.optimizers, read_other)


def _zero_ratio(step: MergedStep | OptimizerStep) -> float | None:
    elements = step.gradients.get("elements")
    return step.gradients["zero_elements"] / elements if elements else None


def _finite(run: RunView) -> Reading:
    main = None
    if run.latest.step is not None and "nan_elements" in run.latest.step.gradients:
        main = float(run.latest.step.gradient_nonfinite_elements == 0.0)
    return of_optimizers(
        main, run.optimizers, lambda other: float(other.last.nonfinite_elements == 0.0)
    )


def _bounds(thresholds: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    return tuple((level_label(name),) for name in _NORM_BOUNDS)


def _exceeded(change: StepTransition) -> Reading:
    step = change.step
    norms: dict[tuple[str, ...], float | None] = {
        (name,): own.grad_norm if own.judged else None for name, own in step.optimizers.items()
    }
    norms[()] = step.grad_norm if step.gradients_judged else None
    limits = {level_label(name): change.thresholds[name] for name in _NORM_BOUNDS}
    return {
        (level, *optimizer): float(norm > limit)
        for optimizer, norm in norms.items()
        if norm is not None
        for level, limit in limits.items()
    }


def _unclipped(change: StepTransition) -> Reading:
    """Count what exceeds a bound, unless it was contained; of other models that is not known."""
    exceeded, optimizers = _exceeded(change), change.step.optimizers
    if not isinstance(exceeded, Mapping) or not change.step.contained:
        return exceeded
    return {
        (bound, *name): 0.0 if not name or optimizers[name[0]].joint else value
        for (bound, *name), value in exceeded.items()
    }


def fp16_headroom(step: MergedStep) -> float | None:
    """Return the doublings from a step's largest scaled gradient to FP16's largest number.

    Takes logarithms one by one: the product may be beyond float64.
    """
    largest, scale = step.get("abs_max"), step.loss_scale
    if not largest or not scale or scale < 0:
        return None
    return log2(_FP16_MAX) - log2(largest) - log2(scale)


def _nonfinite_step(change: StepTransition) -> Reading:
    return of_optimizers(
        float(change.step.gradient_nonfinite_elements > 0),
        change.step.optimizers,
        lambda other: float(other.nonfinite_elements > 0),
    )


def _elements(change: StepTransition, column: str) -> Reading:
    return of_optimizers(
        change.step.gradients.get(column, 0.0),
        change.step.optimizers,
        lambda other: other.gradients.get(column, 0.0),
    )


def _nonfinite_update(change: StepTransition) -> Reading:
    """Count per optimizer too; one of another model has no gradients where its step is skipped."""
    step = change.step
    kept = step.weights_kept
    return of_optimizers(
        float(not kept and step.gradient_nonfinite_elements > 0),
        step.optimizers,
        lambda own: float(not (own.joint and kept) and own.nonfinite_elements > 0),
    )


def _clipped(change: StepTransition) -> Reading:
    coefficient = change.step.clip_coefficient
    return float(coefficient is not None and coefficient < 1.0 and not change.step.skipped)


GRAD_NORM = gauge(
    "mp_agent.grad.norm",
    "{norm}",
    help="Global L2 norm of the unscaled gradients before clipping; last step that was neither "
    "skipped nor non-finite.",
    optional_labels=OPTIMIZER,
    read=lambda run: _judged(run, lambda step: step.grad_norm),
)
GRAD_ABS_MIN = gauge(
    "mp_agent.grad.abs_min",
    "{gradient}",
    help="Smallest gradient magnitude other than zero, same step as the norm; absent when all "
    "are zero.",
    optional_labels=OPTIMIZER,
    read=lambda run: _judged(run, lambda step: step.gradients.get("abs_min")),
)
GRAD_FINITE = gauge(
    "mp_agent.grad.finite",
    "",
    help="1 if all gradients of the last step were finite, else 0.",
    optional_labels=OPTIMIZER,
    read=_finite,
)
GRAD_NORM_WINDOW_MAX = gauge(
    "mp_agent.grad.norm.window_max",
    "{norm}",
    help="Largest gradient norm over the last window_seconds.",
    optional_labels=OPTIMIZER,
    read=lambda run: {
        optimizer_labels(name): largest for name, (largest, _) in run.norm_extremes.items()
    },
)
GRAD_NORM_EXCEEDED = counter(
    "mp_agent.grad.norm.exceeded.steps",
    "{step}",
    labels=("bound",),
    optional_labels=OPTIMIZER,
    label_values=_bounds,
    thresholds=_NORM_BOUNDS,
    help="Steps whose gradient norm was above the bound, by the bound's level.",
    count=_exceeded,
)
GRAD_NORM_UNCLIPPED = counter(
    "mp_agent.grad.norm.unclipped.steps",
    "{step}",
    labels=("bound",),
    optional_labels=OPTIMIZER,
    label_values=_bounds,
    thresholds=_NORM_BOUNDS,
    help="Steps whose gradient norm was above the bound and was not shrunk by clipping or the "
    "guard, nor kept from the weights.",
    count=_unclipped,
)
GRAD_FP16_HEADROOM = gauge(
    "mp_agent.grad.fp16.headroom",
    "{bit}",
    help="Doublings that the largest scaled gradient is away from FP16's largest number, same "
    "step as the norm; absent without a loss scale.",
    read=lambda run: fp16_headroom(run.latest.judged) if run.latest.judged else None,
)
NONFINITE_UPDATES = counter(
    "mp_agent.nonfinite.updates",
    "{step}",
    help="Steps on which the optimizer was stepped with non-finite gradients, but for those of "
    "which the guard skipped the update.",
    optional_labels=OPTIMIZER,
    count=_nonfinite_update,
)
CLIP_MAX_NORM = gauge(
    "mp_agent.clip.max_norm",
    "{norm}",
    help="Limit given to gradient clipping.",
    read=lambda run: None if run.latest.step is None else run.latest.step.get("clip_max_norm"),
)
CLIPPED_STEPS = counter(
    "mp_agent.clipped.steps",
    "{step}",
    help="Steps on which clipping shrank the gradients.",
    count=_clipped,
)

GRADIENT_METRICS = (
    GRAD_NORM,
    gauge(
        "mp_agent.grad.abs_max",
        "{gradient}",
        help="Largest gradient magnitude of the same step as the norm.",
        optional_labels=OPTIMIZER,
        read=lambda run: _judged(run, lambda step: step.gradients.get("abs_max")),
    ),
    GRAD_ABS_MIN,
    gauge(
        "mp_agent.grad.zero",
        "1",
        help="Share of gradient elements that are exactly zero, same step as the norm.",
        optional_labels=OPTIMIZER,
        read=lambda run: _judged(run, _zero_ratio),
    ),
    GRAD_FINITE,
    GRAD_NORM_WINDOW_MAX,
    gauge(
        "mp_agent.grad.norm.window_min",
        "{norm}",
        help="Smallest gradient norm over the last window_seconds.",
        optional_labels=OPTIMIZER,
        read=lambda run: {
            optimizer_labels(name): smallest for name, (_, smallest) in run.norm_extremes.items()
        },
    ),
    GRAD_NORM_EXCEEDED,
    gauge(
        "mp_agent.grad.norm.bound",
        "{norm}",
        labels=("bound",),
        thresholds=_NORM_BOUNDS,
        help="Gradient norm above which steps are counted at each level, as this job has set it.",
        read=lambda run: {
            (level_label(name),): run.thresholds[name]
            for name in _NORM_BOUNDS
            if name in run.thresholds
        },
    ),
    GRAD_NORM_UNCLIPPED,
    GRAD_FP16_HEADROOM,
    counter(
        "mp_agent.grad.nonfinite.steps",
        "{step}",
        help="Steps with at least one NaN or Inf gradient element, skipped or not.",
        optional_labels=OPTIMIZER,
        count=_nonfinite_step,
    ),
    counter(
        "mp_agent.grad.nan.elements",
        "{element}",
        help="Gradient elements that were NaN.",
        optional_labels=OPTIMIZER,
        count=lambda change: _elements(change, "nan_elements"),
    ),
    counter(
        "mp_agent.grad.inf.elements",
        "{element}",
        help="Gradient elements that were +Inf or -Inf.",
        optional_labels=OPTIMIZER,
        count=lambda change: _elements(change, "inf_elements"),
    ),
    NONFINITE_UPDATES,
    CLIP_MAX_NORM,
    gauge(
        "mp_agent.clip.coefficient",
        "{factor}",
        help="Factor that clipping applied to the gradients: 1 when it left them alone.",
        read=lambda run: None if run.latest.judged is None else run.latest.judged.clip_coefficient,
    ),
    CLIPPED_STEPS,
)
