"""Recommends a plan: what `mp_agent.recommend` and the command call."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mp_agent.errors import AdviceError
from mp_agent.plan.comparison.api import Progress
from mp_agent.plan.execution.training import (
    Workload,
    required_count,
    required_positive,
    workload_of,
)
from mp_agent.plan.precision_plan import PRECISIONS, Environment, PrecisionPlan
from mp_agent.plan.recommendation.choose import (
    adam_epsilon,
    candidates_for,
    clip_norm,
    odd_modules,
    ruled_out,
    settings_for,
    speed_estimate,
    training_memory,
)
from mp_agent.plan.recommendation.model import (
    GOALS,
    ConsideredPrecision,
    GradientFacts,
    MatrixProduct,
    PlanReason,
    Recommendation,
    TrainingMemory,
)
from mp_agent.plan.recommendation.products import capability_of, measure_products, read_environment
from mp_agent.plan.recommendation.steps import GradientMeasurement, MeasuredGradients, measure_saved
from mp_agent.plan.recommendation.trials import Trials, TriedPrecision, refused

STEPS = 8
TOLERANCE = 0.05
LEARNING_RATE = 1e-4
SEARCH_TRIALS = 40

_RANGE_OF_FP32 = "no scaler: BF16 and TF32 have the exponents of FP32; gradients do not underflow"
_FP32_NEEDS_NONE = "no scaler: FP32 needs none"


@dataclass(frozen=True, slots=True)
class _Measured:
    environment: Environment
    workload: Workload
    gradients: MeasuredGradients
    products: tuple[MatrixProduct, ...]


def recommend_plan(
    model: nn.Module,
    batch: Any,
    loss: Any = None,
    *,
    goal: str = "speed",
    capability: str | None = None,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    tolerance: float = TOLERANCE,
    search_trials: int = SEARCH_TRIALS,
    progress: Progress = lambda candidate, stage, count: None,
) -> Recommendation:
    """Recommend a plan for a model; `mp_agent.recommend` describes it."""
    if goal not in GOALS:
        raise AdviceError(f"goal: {goal!r} is none of {', '.join(GOALS)}")
    required_count(1, steps=steps)
    required_count(0, search_trials=search_trials)
    required_positive(learning_rate=learning_rate, tolerance=tolerance)
    environment = read_environment(None if capability is None else capability_of(capability))
    workload = workload_of(model, batch, loss, steps)
    # Tensors that are made in inference mode cannot be trained with.
    with torch.inference_mode(False):
        gradients = GradientMeasurement(workload, learning_rate).run(
            steps, lambda done: progress("fp32", "measuring gradients", done)
        )
        measured = _Measured(environment, workload, gradients, measure_products(workload))
        trials = Trials(
            workload=workload,
            gradients=gradients,
            products=measured.products,
            tolerance=tolerance,
            search_trials=search_trials,
            progress=progress,
        )
        chosen, considered = _choose(goal, environment, trials)
        return _recommendation(goal, measured, chosen, considered)


def _choose(
    goal: str, environment: Environment, trials: Trials
) -> tuple[TriedPrecision, tuple[ConsideredPrecision, ...]]:
    """Return the first precision of the goal that the hardware has a use for and that passes."""
    considered = []
    for precision in candidates_for(goal):
        problem = ruled_out(precision, goal, environment.hardware)
        tried = refused(precision, problem) if problem else trials.attempt(precision)
        considered.append(
            ConsideredPrecision(precision=precision, accepted=tried.accepted, reason=tried.reason)
        )
        if tried.accepted:
            return tried, tuple(considered)
    raise AssertionError("FP32 is always accepted")


def _recommendation(
    goal: str,
    measured: _Measured,
    chosen: TriedPrecision,
    considered: tuple[ConsideredPrecision, ...],
) -> Recommendation:
    workload, gradients = measured.workload, measured.gradients
    epsilon, epsilon_reason = adam_epsilon(gradients.parameters)
    clip, clip_reason = clip_norm(gradients.norms, goal)
    plan = PrecisionPlan(
        precision=chosen.precision,
        device=measured.environment.hardware.kind,
        loss_scale=chosen.loss_scale,
        keep_fp32=chosen.keep_fp32,
        adam_epsilon=epsilon,
        clip_norm=clip,
        settings=settings_for(gradients.norms, chosen.loss_scale),
    )
    return Recommendation(
        plan=plan,
        goal=goal,
        model=type(workload.model).__name__,
        parameters=sum(one.numel() for one in workload.model.parameters()),
        environment=measured.environment,
        reasons=(
            *_precision_reasons(chosen),
            PlanReason(subject="Adam epsilon", value=f"{epsilon:g}", text=epsilon_reason),
            PlanReason(
                subject="clip norm", value="none" if clip is None else f"{clip:g}", text=clip_reason
            ),
        ),
        considered=considered,
        gradients=_gradient_facts(gradients, chosen.loss_scale),
        odd_modules=odd_modules(measured.products),
        memory_fp32=_memory(workload, PrecisionPlan(precision="fp32", device=plan.device)),
        memory_planned=_memory(workload, plan),
        speed=speed_estimate(
            plan.precision, measured.environment.hardware, measured.products, plan.keep_fp32
        ),
        notes=(*workload.notes, *measured.environment.notes, *_place(measured)),
    )


def _place(measured: _Measured) -> list[str]:
    hardware, device = measured.environment.hardware, measured.workload.device.type
    if not hardware.detected or hardware.kind == device:
        return []
    return [f"the model is on {device}: its precisions were tried there, not on {hardware.name}"]


def _precision_reasons(chosen: TriedPrecision) -> tuple[PlanReason, ...]:
    reasons = [
        PlanReason(
            subject="precision",
            value=chosen.precision,
            text=f"{PRECISIONS[chosen.precision]}; {chosen.reason}",
        )
    ]
    if chosen.loss_scale is not None:
        text = chosen.scale_reason
        reasons.append(PlanReason(subject="loss scale", value=f"{chosen.loss_scale:g}", text=text))
    else:
        text = _FP32_NEEDS_NONE if chosen.precision == "fp32" else _RANGE_OF_FP32
        reasons.append(PlanReason(subject="loss scale", value="none", text=text))
    if chosen.keep_fp32:
        text = "the smallest set found with which the outputs stay within the tolerance"
        reasons.append(
            PlanReason(subject="keep in FP32", value=", ".join(chosen.keep_fp32), text=text)
        )
    return tuple(reasons)


def _gradient_facts(gradients: MeasuredGradients, loss_scale: float | None) -> GradientFacts:
    parameters, outputs = gradients.parameters, gradients.outputs
    scaled = loss_scale is not None
    return GradientFacts(
        steps=len(gradients.norms),
        norms=gradients.norms,
        losses=gradients.losses,
        abs_max=max(parameters.abs_max, outputs.abs_max),
        smallest_exponent=min(parameters.counts, default=None),
        zero_ratio=parameters.zero_ratio,
        fp16_lost_ratio=parameters.lost_ratio(),
        fp16_lost_scaled_ratio=parameters.lost_ratio(loss_scale or 1.0) if scaled else None,
        activation_lost_scaled_ratio=outputs.lost_ratio(loss_scale or 1.0) if scaled else None,
        bf16_stale_ratio=gradients.stale_ratio,
    )


def _memory(workload: Workload, plan: PrecisionPlan) -> TrainingMemory:
    saved = measure_saved(workload, plan)
    trained = sum(one.numel() for one in workload.model.parameters() if one.requires_grad)
    total = sum(one.numel() for one in workload.model.parameters())
    return training_memory(
        plan.precision, trained, total - trained, saved.cast_elements, saved.activations_bytes
    )
