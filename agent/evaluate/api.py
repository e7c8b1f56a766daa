"""Measures a plan: what `mp_agent.evaluate_plan` and the command call."""

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import nn

from mp_agent.advice.choose.estimates import eligible_ratio
from mp_agent.advice.measure.hardware import read_environment
from mp_agent.advice.measure.products import measure_products
from mp_agent.advice.plan import PrecisionPlan
from mp_agent.advice.training.workload import (
    Workload,
    required_count,
    required_positive,
    workload_of,
)
from mp_agent.errors import AdviceError
from mp_agent.evaluate.execution.memory import measure_peak
from mp_agent.evaluate.execution.turns import train_by_turns
from mp_agent.evaluate.report.model import PlanEvaluation, SideMeasurement
from mp_agent.evaluate.statistics import paired_ratio, tail_difference
from mp_agent.evaluate.targets import (
    PlanTarget,
    loss_target,
    memory_target,
    speed_target,
    tensor_core_target,
)

STEPS = 50
WARMUP_STEPS = 5
LEARNING_RATE = 1e-4

Progress = Callable[[str, str, int], None]


def measure_plan(
    model: nn.Module,
    batch: Any,
    loss: Any,
    plan: Any,
    *,
    steps: int = STEPS,
    warmup_steps: int = WARMUP_STEPS,
    learning_rate: float = LEARNING_RATE,
    progress: Progress = lambda candidate, stage, count: None,
) -> PlanEvaluation:
    """Measure a plan against FP32; `mp_agent.evaluate_plan` describes it."""
    if not isinstance(plan, PrecisionPlan):
        raise AdviceError(f"plan: {type(plan).__name__} is not a PrecisionPlan")
    required_count(0, warmup_steps=warmup_steps)
    required_count(warmup_steps + 1, steps=steps)
    required_positive(learning_rate=learning_rate)
    workload = workload_of(model, batch, loss, steps)
    fp32 = PrecisionPlan(
        precision="fp32",
        device=plan.device,
        adam_epsilon=plan.adam_epsilon,
        clip_norm=plan.clip_norm,
    )
    with torch.inference_mode(False):
        peaks = [measure_peak(workload, one, learning_rate) for one in (fp32, plan)]
        sides = train_by_turns(
            workload,
            fp32,
            plan,
            learning_rate,
            steps,
            lambda done: progress(plan.precision, "training by turns", done),
        )
        eligible = eligible_ratio(measure_products(workload), plan.keep_fp32)
    return _evaluation(
        workload, plan, warmup_steps, learning_rate, sides, peaks, tensor_core_target(eligible)
    )


def _evaluation(
    workload: Workload,
    plan: PrecisionPlan,
    warmup_steps: int,
    learning_rate: float,
    sides: tuple[SideMeasurement, SideMeasurement, SideMeasurement],
    peaks: list[tuple[int, str]],
    tensor_cores: PlanTarget,
) -> PlanEvaluation:
    exact, planned, perturbed = sides
    ratio, interval = paired_ratio(exact.seconds[warmup_steps:], planned.seconds[warmup_steps:])
    difference = tail_difference(planned.losses, exact.losses)
    noise = tail_difference(perturbed.losses, exact.losses)
    environment = read_environment()
    targets = [
        speed_target(ratio, *interval),
        memory_target(1 - peaks[1][0] / peaks[0][0]),
        loss_target(difference, noise),
    ]
    if plan.precision != "fp32":
        targets.append(tensor_cores)
    return PlanEvaluation(
        plan=plan,
        model=type(workload.model).__name__,
        parameters=sum(one.numel() for one in workload.model.parameters()),
        steps=len(exact.losses),
        warmup_steps=warmup_steps,
        learning_rate=learning_rate,
        environment=environment,
        fp32=exact,
        planned=planned,
        perturbed=perturbed,
        speed_ratio=ratio,
        speed_interval=interval,
        fp32_peak_bytes=peaks[0][0],
        planned_peak_bytes=peaks[1][0],
        memory_source=peaks[0][1],
        loss_difference_ratio=difference,
        perturbed_difference_ratio=noise,
        targets=tuple(targets),
        notes=(*workload.notes, *_notes(workload, plan, exact, planned)),
    )


def _notes(
    workload: Workload, plan: PrecisionPlan, exact: SideMeasurement, planned: SideMeasurement
) -> list[str]:
    notes = []
    device = workload.device.type
    if plan.device != device:
        notes.append(
            f"the plan is for {plan.device}, but was measured on {device}, where the model is: "
            f"speed and memory are those of {device}"
        )
    if len(workload.batches) == 1:
        notes.append("one batch in every step: losses are of a model that learns it by heart")
    for name, side in (("FP32", exact), ("the plan", planned)):
        lost = [step for step, loss in enumerate(side.losses, 1) if not isfinite(loss)]
        if lost:
            notes.append(f"the loss of {name} is not finite from step {lost[0]} on")
    if planned.skipped_steps:
        notes.append(
            f"{planned.skipped_steps} steps overflowed, were skipped, and lowered the scale"
        )
    return notes
