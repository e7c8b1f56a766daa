"""Recommends a plan: what `mp_agent.recommend` and the command call."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from mp_agent.errors import AdviceError
from mp_agent.plan.comparison.api import Progress
from mp_agent.plan.comparison.model import TOLERANCE
from mp_agent.plan.execution.training import (
    Workload,
    required_count,
    required_positive,
    workload_of,
)
from mp_agent.plan.precision_plan import GOALS, PRECISIONS, Environment, PrecisionPlan
from mp_agent.plan.recommendation.choose import (
    REINFORCEMENT,
    adam_beta2,
    adam_epsilon,
    candidates_for,
    clip_norm,
    guard_for,
    memory_problem,
    odd_modules,
    ruled_out,
    settings_for,
    speed_estimate,
    training_memory,
)
from mp_agent.plan.recommendation.model import (
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
    memory_bytes: int | None = None,
    reinforcement: bool = False,
    excluded: Mapping[str, str] = MappingProxyType({}),
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    tolerance: float = TOLERANCE,
    search_trials: int = SEARCH_TRIALS,
    progress: Progress = lambda candidate, stage, count: None,
) -> Recommendation:
    """Recommend a plan for a model; `mp_agent.recommend` describes it.

    excluded: precisions that are not to be taken, with the reason.
    """
    if goal not in GOALS:
        raise AdviceError(f"goal: {goal!r} is none of {', '.join(GOALS)}")
    required_count(1, steps=steps)
    required_count(0, search_trials=search_trials)
    required_positive(learning_rate=learning_rate, tolerance=tolerance)
    if memory_bytes is not None:
        required_count(1, memory_bytes=memory_bytes)
    if reinforcement:
        excluded = {**dict.fromkeys(("bf16", "bf16-autocast"), REINFORCEMENT), **excluded}
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
        limits = _Limits(goal, excluded, _available(environment, workload, memory_bytes))
        chosen, considered = _choose(limits, environment, trials)
        return _recommendation(goal, measured, chosen, considered)


@dataclass(frozen=True, slots=True)
class _Limits:
    goal: str
    excluded: Mapping[str, str]
    """Why a precision is not to be tried, by its name."""
    memory_bytes: int | None


def _available(
    environment: Environment, workload: Workload, memory_bytes: int | None
) -> int | None:
    """Return what a training has, the weights of the model that are there already among it."""
    free = environment.hardware.memory_free_bytes
    if memory_bytes is not None or free is None:
        return memory_bytes
    here = environment.hardware.kind == workload.device.type
    weights = sum(one.numel() * one.element_size() for one in workload.model.parameters())
    return free + weights * here


def _choose(
    limits: _Limits, environment: Environment, trials: Trials
) -> tuple[TriedPrecision, tuple[ConsideredPrecision, ...]]:
    """Return the first precision that the hardware has a use for, that passes, and that fits.

    Where none of the goal's fits the memory, those that need the least are tried as well.
    """
    considered: list[ConsideredPrecision] = []
    for precision in dict.fromkeys((*candidates_for(limits.goal), *candidates_for("memory"))):
        of_goal = precision in candidates_for(limits.goal)
        goal = limits.goal if of_goal else "memory"
        problem = limits.excluded.get(precision) or ruled_out(precision, goal, environment.hardware)
        tried = refused(precision, problem) if problem else trials.attempt(precision)
        if tried.accepted and limits.memory_bytes is not None:
            plan = _bare_plan(tried, environment)
            if problem := memory_problem(_memory(trials.workload, plan), limits.memory_bytes):
                tried = refused(precision, problem)
        considered.append(
            ConsideredPrecision(precision=precision, accepted=tried.accepted, reason=tried.reason)
        )
        if tried.accepted:
            return tried, tuple(considered)
    reasons = "; ".join(f"{one.precision}: {one.reason}" for one in considered)
    raise AdviceError(f"memory: no plan fits: {reasons}")


def _bare_plan(chosen: TriedPrecision, environment: Environment) -> PrecisionPlan:
    """Return the plan as far as memory depends on it."""
    return PrecisionPlan(
        precision=chosen.precision,
        device=environment.hardware.kind,
        loss_scale=chosen.loss_scale,
        keep_fp32=chosen.keep_fp32,
    )


def _recommendation(
    goal: str,
    measured: _Measured,
    chosen: TriedPrecision,
    considered: tuple[ConsideredPrecision, ...],
) -> Recommendation:
    workload, gradients = measured.workload, measured.gradients
    epsilon, epsilon_reason = adam_epsilon(gradients.parameters)
    beta2, beta2_reason = adam_beta2(chosen.precision)
    clip, clip_reason = clip_norm(gradients.norms, goal)
    guard, guard_reason = guard_for(gradients.parameters, chosen.loss_scale)
    plan = replace(
        _bare_plan(chosen, measured.environment),
        adam_epsilon=epsilon,
        adam_beta2=beta2,
        clip_norm=clip,
        settings={**settings_for(gradients.norms, chosen.loss_scale), "guard": guard},
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
            PlanReason(subject="Adam beta2", value=f"{beta2:g}", text=beta2_reason),
            PlanReason(
                subject="clip norm", value="none" if clip is None else f"{clip:g}", text=clip_reason
            ),
            PlanReason(subject="guard", value="\n".join(guard), text=guard_reason),
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


def _real_numbers(tensor: Tensor) -> int:
    return tensor.numel() * (1 + tensor.is_complex())


def _memory(workload: Workload, plan: PrecisionPlan) -> TrainingMemory:
    saved = measure_saved(workload, plan)
    parameters = list(workload.model.parameters())
    trained = sum(_real_numbers(one) for one in parameters if one.requires_grad)
    total = sum(map(_real_numbers, parameters))
    return training_memory(
        plan.precision, trained, total - trained, saved.cast_elements, saved.activations_bytes
    )
