"""Measures how large a model's outputs are, as a unit for their errors."""

from typing import Any

from torch import nn

from mp_agent.advice.plan import PrecisionPlan
from mp_agent.advice.training.planned import PlannedTraining
from mp_agent.advice.training.workload import Workload
from mp_agent.compare.execution.session import uncompiled
from mp_agent.compare.execution.task import in_plain_thread
from mp_agent.compare.measure.trees import floating


def measure_outputs_rms(workload: Workload) -> float:
    """Return the RMS of all floating-point outputs of the model on the first batch, in FP32.

    The magnitude of the loss where the model returns no tensor.
    """
    plan = PrecisionPlan(precision="fp32", device="cpu")
    training = PlannedTraining(workload, plan, learning_rate=1.0)
    squares: list[tuple[float, int]] = []
    losses: list[float] = []

    def watch(module: nn.Module, args: Any, outputs: Any) -> None:
        for one in floating(outputs).values():
            values = one.detach().double()
            squares.append((float(values.square().sum()), values.numel()))

    def body() -> None:
        batch = training.inputs(workload.batch(0))
        losses.append(float(training.forward(batch).detach()))

    training.model.register_forward_hook(watch)
    with training.products(), uncompiled():
        in_plain_thread(workload.device, body)
    total = sum(count for _, count in squares)
    if not total:
        return abs(losses[0])
    return float((sum(value for value, _ in squares) / total) ** 0.5)
