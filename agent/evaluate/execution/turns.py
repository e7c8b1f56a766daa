"""Trains by turns: a step in FP32, the same step by the plan, and the other way round."""

from collections.abc import Callable
from time import perf_counter

import torch

from mp_agent.advice.plan import PrecisionPlan
from mp_agent.advice.training.planned import PlannedTraining
from mp_agent.advice.training.workload import Workload
from mp_agent.compare.execution.randomness import Randomness
from mp_agent.compare.execution.session import uncompiled
from mp_agent.compare.execution.task import in_plain_thread
from mp_agent.evaluate.report.model import SideMeasurement


class _Side:
    """One training, with random numbers of its own that begin as the others' do."""

    def __init__(self, workload: Workload, plan: PrecisionPlan, learning_rate: float) -> None:
        self.training = PlannedTraining(workload, plan, learning_rate)
        self._workload = workload
        self._randomness = Randomness.now()
        self._losses: list[float] = []
        self._seconds: list[float] = []
        scaler = self.training.scaler
        self._scales = [] if scaler is None else [scaler.get_scale()]

    def step(self, step: int) -> None:
        """Train one step and time it."""
        training = self.training
        self._randomness.restore()
        batch = training.inputs(self._workload.batch(step))
        with training.products():
            _synchronize(self._workload.device)
            start = perf_counter()
            loss = training.forward(batch)
            training.update(loss)
            _synchronize(self._workload.device)
            self._seconds.append(perf_counter() - start)
        self._losses.append(float(loss.detach()))
        if training.scaler is not None:
            self._scales.append(training.scaler.get_scale())
        self._randomness = Randomness.now()

    def measured(self) -> SideMeasurement:
        """Return what the steps showed."""
        return SideMeasurement(
            losses=tuple(self._losses),
            seconds=tuple(self._seconds),
            loss_scales=tuple(self._scales),
        )


def train_by_turns(
    workload: Workload,
    fp32: PrecisionPlan,
    plan: PrecisionPlan,
    learning_rate: float,
    steps: int,
    on_step: Callable[[int], None],
) -> tuple[SideMeasurement, SideMeasurement, SideMeasurement]:
    """Return the measurements in FP32, by the plan, and in FP32 from perturbed weights.

    The order of the first two alternates from step to step, so that a machine that becomes slower
    or faster favors neither. The third is trained after both.
    """
    sides = [_Side(workload, one, learning_rate) for one in (fp32, plan, fp32)]
    _perturb(sides[2].training)

    def body() -> None:
        for step in range(steps):
            for side in (0, 1, 2) if step % 2 == 0 else (1, 0, 2):
                sides[side].step(step)
            on_step(step + 1)

    try:
        with uncompiled():
            in_plain_thread(workload.device, body)
    finally:
        for side in sides:
            side.training.close()
    first, second, third = (side.measured() for side in sides)
    return first, second, third


def _perturb(training: PlannedTraining) -> None:
    """Replace each weight by the next larger number."""
    for parameter in training.model.parameters():
        if parameter.is_floating_point():
            infinity = torch.full_like(parameter, float("inf"))
            parameter.data = torch.nextafter(parameter.detach(), infinity)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
