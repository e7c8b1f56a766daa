"""What mixed precision should reach, and whether a measurement did."""

from dataclasses import dataclass
from enum import Enum

from mp_agent.compare.report.text import percent

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
    value = "the loss is not finite" if difference is None else percent(difference)
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
