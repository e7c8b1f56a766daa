"""What `mp_agent.evaluate_plan` returns."""

from dataclasses import dataclass
from itertools import pairwise

from mp_agent.advice.environment import Environment
from mp_agent.advice.plan import PrecisionPlan
from mp_agent.evaluate.targets import Outcome, PlanTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class SideMeasurement:
    """One training: by the plan, in FP32, or in FP32 from weights one last bit apart."""

    losses: tuple[float, ...]
    """Per step, not finite ones among them."""
    seconds: tuple[float, ...]
    """Per step: forward, backward, update; without loading the batch."""
    loss_scales: tuple[float, ...] = ()
    """Before the first step, and after each; empty without a scaler."""

    @property
    def skipped_steps(self) -> int:
        """Steps after which the loss scale was lower, which GradScaler skipped."""
        scales = self.loss_scales
        return sum(after < before for before, after in pairwise(scales))


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
    def missed(self) -> tuple[str, ...]:
        """Names of the targets that were measured and missed."""
        return tuple(one.name for one in self.targets if one.outcome is Outcome.MISSED)

    def as_json(self) -> str:
        """Return the evaluation as JSON; docs/recommend.md describes it."""
        from mp_agent.evaluate.report.document import as_json

        return as_json(self)

    def as_html(self) -> str:
        """Return the evaluation as one HTML page that loads nothing."""
        from mp_agent.evaluate.report.html.page import as_html

        return as_html(self)
