"""A few FP32 steps of a model's copy: magnitudes of gradients, norms, updates lost in BF16."""

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum, isfinite, sqrt
from typing import Any

from torch import Tensor, nn

from mp_agent.advice.choose.exponents import ExponentCounts
from mp_agent.advice.measure.exponents import count_exponents
from mp_agent.advice.plan import PrecisionPlan
from mp_agent.advice.training.planned import PlannedTraining
from mp_agent.advice.training.workload import Workload, trained_parameters
from mp_agent.compare.execution.session import uncompiled
from mp_agent.compare.execution.task import in_plain_thread
from mp_agent.compare.measure.trees import floating
from mp_agent.errors import AdviceError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGradients:
    """What the steps showed; gradients are unscaled, before clipping."""

    parameters: ExponentCounts
    outputs: ExponentCounts
    """Gradients of the outputs of modules that have more than one element."""
    norms: tuple[float, ...]
    losses: tuple[float, ...]
    stale_ratio: float | None
    """Share of AdamW's updates after which a weight in BF16 is the same; None without updates."""


class GradientMeasurement:
    """Trains a copy in FP32 with AdamW and counts its gradients."""

    def __init__(self, workload: Workload, learning_rate: float) -> None:
        plan = PrecisionPlan(precision="fp32", device="cpu")
        self._training = PlannedTraining(workload, plan, learning_rate)
        self._workload = workload
        self._trained = trained_parameters(self._training.model)
        self._parameters = ExponentCounts()
        self._outputs = ExponentCounts()
        self._norms: list[float] = []
        self._losses: list[float] = []
        self._updates = self._stale = 0
        for module in self._training.model.modules():
            module.register_forward_hook(self._watch)

    def run(self, steps: int, on_step: Callable[[int], None]) -> MeasuredGradients:
        """Train for some steps. Raises AdviceError when the loss or a gradient is not finite."""

        def body() -> None:
            for step in range(steps):
                self._step(step)
                on_step(step + 1)

        with self._training.products(), uncompiled():
            in_plain_thread(self._workload.device, body)
        return MeasuredGradients(
            parameters=self._parameters,
            outputs=self._outputs,
            norms=tuple(self._norms),
            losses=tuple(self._losses),
            stale_ratio=self._stale / self._updates if self._updates else None,
        )

    def _step(self, step: int) -> None:
        training = self._training
        loss = training.forward(training.inputs(self._workload.batch(step)))
        self._losses.append(float(loss.detach()))
        self._require(isfinite(self._losses[-1]), step, f"the loss is {self._losses[-1]}")
        if not loss.requires_grad:
            raise AdviceError("loss: depends on no parameter that is trained")
        loss.backward()  # type: ignore[no-untyped-call]
        before = [one.detach().clone() for one in self._trained]
        self._count(step)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        self._compare_updates(before)

    def _count(self, step: int) -> None:
        squares = []
        for parameter in self._trained:
            if parameter.grad is None:
                continue
            counted = count_exponents(parameter.grad)
            self._require(counted.nonfinite == 0, step, "a gradient is NaN or Inf")
            self._parameters = self._parameters.plus(counted)
            squares.append(float(parameter.grad.detach().double().square().sum()))
        self._norms.append(sqrt(fsum(squares)))

    def _require(self, finite: bool, step: int, problem: str) -> None:
        if not finite:
            raise AdviceError(
                f"model: {problem} at step {step + 1} in FP32 already; no precision repairs that"
            )

    def _compare_updates(self, before: list[Tensor]) -> None:
        """Count the updates that would leave a weight in BF16 as it was."""
        for old, parameter in zip(before, self._trained, strict=True):
            update = parameter.detach() - old
            low = old.bfloat16()
            moved = update != 0
            stale = moved & ((low.float() + update).bfloat16() == low)
            self._updates += int(moved.sum())
            self._stale += int(stale.sum())

    def _watch(self, module: nn.Module, args: Any, outputs: Any) -> None:
        for tensor in floating(outputs).values():
            # A loss, whose gradient is 1, stays in FP32 in every precision that is tried.
            if tensor.requires_grad and tensor.numel() > 1:
                tensor.register_hook(self._count_output)  # type: ignore[no-untyped-call]

    def _count_output(self, gradient: Tensor) -> None:
        self._outputs = self._outputs.plus(count_exponents(gradient))
