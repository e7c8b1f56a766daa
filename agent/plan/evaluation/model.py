"""What mixed precision should reach, what was measured, and whether it did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import comb, isfinite
from statistics import fmean, median

from mp_agent.plan.comparison.model import BAD_RATIO, quality_grade
from mp_agent.plan.precision_plan import GOALS, Environment, PrecisionPlan
from mp_agent.report.content import plain, written
from mp_agent.report.numbers import percent, size

FORMAT = "mp_agent precision evaluation"
SPEED_RATIO = 2.0
MEMORY_SAVED_RATIO = 0.3
LOSS_DIFFERENCE_RATIO = 0.005
TENSOR_CORE_RATIO = 0.8


class Outcome(Enum):
    """Whether a target is reached."""

    MET = "met"
    MISSED = "missed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """One target with what was measured."""

    name: str
    """`speed`, `memory`, `loss` or `tensor cores`."""
    target: str
    value: str
    outcome: Outcome


def speed_target(ratio: float, low: float, high: float) -> PlanTarget:
    """Return the target of the speed-up; low, high: its interval."""
    return PlanTarget(
        name="speed",
        target=f"time of FP32 ÷ time of the plan > {SPEED_RATIO:g}",
        value=f"{ratio:.2f} (90 % interval {low:.2f} to {high:.2f})",
        outcome=_outcome(ratio > SPEED_RATIO),
    )


def memory_target(saved_ratio: float) -> PlanTarget:
    """Return the target of the memory saved."""
    return PlanTarget(
        name="memory",
        target=f"memory saved > {percent(MEMORY_SAVED_RATIO)}",
        value=percent(saved_ratio) if saved_ratio >= 0 else f"-{percent(-saved_ratio)}",
        outcome=_outcome(saved_ratio > MEMORY_SAVED_RATIO),
    )


def loss_target(difference: float | None, noise: float | None) -> PlanTarget:
    """Return the target of the loss; difference: None for a loss that is not finite.

    noise: the same of FP32 from weights that differ in their last bit.
    """
    value = (
        "the loss is not finite"
        if difference is None
        else f"{percent(difference)}: {quality_grade(difference)}"
    )
    if noise is not None:
        value += f" (FP32 from weights one last bit apart: {percent(noise)})"
    return PlanTarget(
        name="loss",
        target=f"difference of the loss < {percent(LOSS_DIFFERENCE_RATIO)}",
        value=value,
        outcome=_outcome(difference is not None and difference < LOSS_DIFFERENCE_RATIO),
    )


def tensor_core_target(eligible_ratio: float) -> PlanTarget:
    """Return the target of tensor cores, which only a profiler of the GPU measures."""
    return PlanTarget(
        name="tensor cores",
        target=f"utilization of tensor cores > {percent(TENSOR_CORE_RATIO)}",
        value=f"{percent(eligible_ratio)} of the products have dimensions for them",
        outcome=Outcome.NOT_MEASURED,
    )


def _outcome(met: bool) -> Outcome:
    return Outcome.MET if met else Outcome.MISSED


_CONFIDENCE = 0.9


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, tuple[float, float]]:
    """Return the median of the ratios of pairs, and its 90 % interval.

    The interval lies between two order statistics: the number of ratios below the true median is
    binomial with probability 1/2. With fewer than five pairs it is their whole range, which covers
    less than 90 %.
    """
    ratios = sorted(one / other for one, other in zip(numerators, denominators, strict=True))
    count, rank = len(ratios), 0
    below = 1.0
    while 2 * below <= (1 - _CONFIDENCE) * 2.0**count:
        rank += 1
        below += comb(count, rank)
    # `rank` values are outside on each side.
    return median(ratios), (ratios[max(0, rank - 1)], ratios[min(count - 1, count - rank)])


def tail_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return |a − b| / |b| of the mean losses of the last fifth of the steps.

    None unless both means are finite; 0 where both are zero.
    """
    tail = max(1, len(reference) // 5)
    mean, expected = fmean(losses[-tail:]), fmean(reference[-tail:])
    if not (isfinite(mean) and isfinite(expected)):
        return None
    if expected == 0:
        return 0.0 if mean == 0 else None
    return abs(mean - expected) / abs(expected)


def relative_differences(values: Sequence[float], reference: Sequence[float]) -> list[float | None]:
    """Return |a − b| / |b| of each step; None where there is none, or where it is zero."""
    found: list[float | None] = []
    for value, expected in zip(values, reference, strict=True):
        known = isfinite(value) and isfinite(expected) and expected != 0 and value != expected
        found.append(abs(value - expected) / abs(expected) if known else None)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SideMeasurement:
    """One training: by the plan, in FP32, or in FP32 from weights one last bit apart."""

    losses: tuple[float, ...]
    """Losses per step, not finite ones among them."""
    seconds: tuple[float, ...]
    """Seconds per step of forward, backward and update, without loading the batch."""
    loss_scales: tuple[float, ...] = ()
    """Scales before the first step and after each; empty without a scaler."""

    @property
    def skipped_steps(self) -> int:
        """Steps after which the loss scale was lower, which GradScaler skipped."""
        scales = self.loss_scales
        return sum(after < before for before, after in pairwise(scales))


def excluded_by(precision: str, rejections: Mapping[str, str], goal: str) -> dict[str, str]:
    """Return a precision with why it was rejected for a goal; none where it was not."""
    return {precision: f"measured: {rejections[goal]}"} if goal in rejections else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvaluation:
    """A plan, measured against FP32 from the same weights, batches and random numbers."""

    plan: PrecisionPlan
    model: str
    """Name of its class."""
    parameters: int
    steps: int
    warmup_steps: int
    """First steps, which speed leaves out."""
    learning_rate: float
    environment: Environment
    device: str
    """`cuda` or `cpu`: where it was measured; speed and memory are those of it."""
    fp32: SideMeasurement
    planned: SideMeasurement
    perturbed: SideMeasurement
    """FP32 from weights one last bit apart: what a difference of the loss means at all."""
    speed_ratio: float
    """Median over steps of time in FP32 divided by time by the plan."""
    speed_interval: tuple[float, float]
    """90 % interval of that median, by order statistics."""
    fp32_peak_bytes: int
    planned_peak_bytes: int
    memory_source: str
    loss_difference_ratio: float | None
    """|plan − FP32| / |FP32| of the mean losses of the last fifth of steps; None unless finite."""
    perturbed_difference_ratio: float | None
    targets: tuple[PlanTarget, ...]
    notes: tuple[str, ...] = ()

    @property
    def memory_saved_ratio(self) -> float:
        """Share of the peak memory of FP32 that the plan saves."""
        return 1 - self.planned_peak_bytes / self.fp32_peak_bytes

    @property
    def rejections(self) -> dict[str, str]:
        """Return why the plan is not to be used, by goal; none where it may be.

        For no goal when the loss is lost, or differs by more than quality bears and twice as much
        as FP32 differs from itself; where it was measured on the device that it is for, also for
        speed when it is surely slower than FP32, and for memory when it saves none.
        """
        if self.plan.precision == "fp32":
            return {}
        if problem := self._loss_problem():
            return dict.fromkeys(GOALS, problem)
        if self.device != self.plan.device:
            return {}
        found = {}
        low, high = self.speed_interval
        if high < 1.0:
            found["speed"] = (
                f"{self.speed_ratio:.2f} times as fast as FP32 (90 % interval {low:.2f} to "
                f"{high:.2f})"
            )
        if self.memory_saved_ratio <= 0.0:
            found["memory"] = (
                f"a peak of {size(self.planned_peak_bytes)}, FP32 {size(self.fp32_peak_bytes)}"
            )
        return found

    def excluded(self, goal: str) -> dict[str, str]:
        """Return the plan's precision with why it is not to be used for a goal; none where it may.

        As `recommend` takes it.
        """
        return excluded_by(self.plan.precision, self.rejections, goal)

    def _loss_problem(self) -> str:
        difference, noise = self.loss_difference_ratio, self.perturbed_difference_ratio
        if not all(map(isfinite, self.fp32.losses)):
            return ""
        lost = [step for step, loss in enumerate(self.planned.losses, 1) if not isfinite(loss)]
        if lost:
            return f"the loss is not finite from step {lost[0]} on, in FP32 it is"
        if difference is None or noise is None or difference <= max(BAD_RATIO, 2 * noise):
            return ""
        return (
            f"the loss differs from that of FP32 by {percent(difference)} "
            f"({quality_grade(difference)}), FP32 from itself by {percent(noise)}"
        )

    @property
    def missed(self) -> tuple[str, ...]:
        """Names of the targets that were measured and missed."""
        return tuple(one.name for one in self.targets if one.outcome is Outcome.MISSED)

    def as_json(self) -> str:
        """Return the evaluation as JSON; docs/recommend.md describes it."""
        return written(
            {
                "format": FORMAT,
                "version": 1,
                **plain(self),
                "plan": self.plan.as_dict(),
                "memory_saved_ratio": self.memory_saved_ratio,
                "skipped_steps": self.planned.skipped_steps,
                "missed": self.missed,
                "rejections": self.rejections,
            }
        )

    def as_html(self) -> str:
        """Return the evaluation as one HTML page that loads nothing."""
        from mp_agent.plan.evaluation.report import as_html

        return as_html(self)
