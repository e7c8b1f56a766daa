"""Tries a precision: a loss scale with finite gradients, the comparison, what to keep in FP32."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from mp_agent.plan.comparison.api import Progress, compare
from mp_agent.plan.comparison.model import CandidateComparison
from mp_agent.plan.execution.calls import Task
from mp_agent.plan.execution.session import run_alone
from mp_agent.plan.execution.training import Workload
from mp_agent.plan.precision_plan import BY_NAME
from mp_agent.plan.recommendation.choose import LOST_MAX, ExponentCounts, initial_scale, kept_ratio
from mp_agent.plan.recommendation.model import MatrixProduct
from mp_agent.plan.recommendation.steps import MeasuredGradients
from mp_agent.report.numbers import percent, scientific

STALE_MAX = 0.1
"""Share of updates lost to BF16 weights from which they are not recommended."""
KEPT_MAX = 0.5
"""Share of the products that may stay in FP32; with more, 16 bits bring next to nothing."""
_HALVINGS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPrecision:
    """What a trial showed."""

    precision: str
    accepted: bool
    reason: str
    loss_scale: float | None = None
    scale_reason: str = ""
    keep_fp32: tuple[str, ...] = ()


def refused(precision: str, reason: str) -> TriedPrecision:
    """Return that a precision is not recommended, and why."""
    return TriedPrecision(precision=precision, accepted=False, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Tries precisions on the first batch."""

    workload: Workload
    gradients: MeasuredGradients
    products: Sequence[MatrixProduct]
    tolerance: float
    """Mean absolute difference of the model's outputs, as a share of their RMS."""
    search_trials: int
    progress: Progress

    def attempt(self, precision: str) -> TriedPrecision:
        """Return whether a precision passes, and with what."""
        if precision == "fp32":
            return TriedPrecision(precision=precision, accepted=True, reason="always runs")
        if precision == "bf16" and (problem := self._stale()):
            return refused(precision, problem)
        scale, why = (None, "")
        if precision == "fp16-autocast":
            if problem := self._lost():
                return refused(precision, problem)
            scale, why = self._scale()
        compared = self._compare(precision, scale or 1.0)
        return self._judged(compared, scale, why)

    def _stale(self) -> str:
        stale = self.gradients.stale_ratio or 0.0
        if stale <= STALE_MAX:
            return ""
        return f"{percent(stale)} of AdamW's updates are too small to change a weight in BF16"

    def _lost(self) -> str:
        """Return why no loss scale brings the gradients into FP16's range; "" where one does."""
        both = self.gradients.parameters.plus(self.gradients.outputs)
        lost = self.gradients.parameters.lost_ratio(initial_scale(both))
        if lost <= LOST_MAX:
            return ""
        return (
            f"at the largest loss scale without overflow, {percent(lost)} of the parameters' "
            "gradients that are not zero become zero in FP16"
        )

    def _scale(self) -> tuple[float, str]:
        """Return a loss scale with which a backward pass in FP16 is finite, if there is one."""
        both: ExponentCounts = self.gradients.parameters.plus(self.gradients.outputs)
        wanted = scale = initial_scale(both)
        why = (
            f"the largest measured gradient is {both.abs_max:.2e}; four times that still fits "
            f"FP16, and {percent(self.gradients.parameters.lost_ratio(scale))} of the parameters' "
            "gradients underflow"
        )
        for _ in range(_HALVINGS):
            finite = self._finite(scale)
            if finite is None:
                return wanted, why
            if finite:
                break
            scale /= 2
        else:
            return wanted, why
        if scale < wanted:
            why = f"{why}; a backward pass in FP16 overflowed above {scale:g}"
        return scale, f"{why}; a backward pass in FP16 with it is finite"

    def _finite(self, scale: float) -> bool | None:
        """Return whether gradients are finite at a scale; None where no scale would change that."""
        task = self._task(scale)
        try:
            trial = run_alone(task, BY_NAME["fp16-autocast"], frozenset(), ())
        except Exception:
            # What does not run is named by the comparison that follows.
            return None
        return trial.gradients_finite if isfinite(trial.loss) else None

    def _task(self, scale: float = 1.0) -> Task:
        load = self.workload
        return Task(load.model, load.batch(0), load.loss, load.device, scale)

    def _compare(self, precision: str, scale: float) -> CandidateComparison:
        report = compare(
            self.workload.model,
            self.workload.batch(0),
            self.workload.loss,
            dtypes=[precision],
            tolerance=self.tolerance,
            loss_scale=scale,
            search_trials=self.search_trials,
            progress=self.progress,
        )
        return report.candidates[0]

    def _judged(
        self, compared: CandidateComparison, scale: float | None, why: str
    ) -> TriedPrecision:
        passed = TriedPrecision(
            precision=compared.name,
            accepted=True,
            reason="passes",
            loss_scale=scale,
            scale_reason=why,
        )
        verdict = compared.verdict
        if verdict.passed:
            relative = compared.output.relative_l2 if compared.output is not None else 0.0
            reason = f"passes: relative error of the outputs {scientific(relative)}"
            return replace(passed, reason=reason)
        keep, problem = compared.keep, "; ".join(verdict.reasons)
        if keep is None or not keep.found or keep.verdict is None or not keep.verdict.passed:
            return refused(compared.name, problem)
        names = ", ".join(keep.kept)
        if "" in keep.kept or compared.name not in ("fp16-autocast", "bf16-autocast"):
            return refused(compared.name, problem)
        if (kept := kept_ratio(self.products, keep.kept)) > KEPT_MAX:
            share = f"which are {percent(kept)} of the products"
            return refused(
                compared.name, f"{problem}; it passes only with {names} in FP32, {share}"
            )
        return replace(
            passed,
            reason=f"passes with {names} in FP32; without: {problem}",
            keep_fp32=keep.kept,
        )
