"""Prints what is recommended for each model, and what the plan for this machine measures.

$ python -m benchmarks.advice --steps 60
"""

import argparse
from collections.abc import Iterator

import torch

import mp_agent
from benchmarks.advice.models import MODELS
from benchmarks.machine import describe, markdown
from mp_agent.plan.evaluation.model import PlanEvaluation
from mp_agent.plan.recommendation.model import Recommendation
from mp_agent.report.numbers import percent, size

CAPABILITIES = ("7.0", "8.0", None)
"""A V100, an A100, and what is here."""


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", choices=tuple(MODELS), action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.only or list(MODELS)
    print(describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")), end="\n\n")
    recommended = {(name, one): _recommend(name, one) for name in names for one in CAPABILITIES}
    print(markdown(_RECOMMENDED, _recommended_rows(recommended)), end="\n\n")
    evaluated = {name: _evaluate(name, recommended[name, None], arguments.steps) for name in names}
    print(markdown(_EVALUATED, _evaluated_rows(evaluated)))


def _recommend(name: str, capability: str | None) -> Recommendation:
    return mp_agent.recommend(*MODELS[name](), capability=capability, progress=False)


def _evaluate(name: str, found: Recommendation, steps: int) -> PlanEvaluation:
    return mp_agent.evaluate_plan(
        *MODELS[name](), found.plan, steps=steps, learning_rate=1e-3, progress=False
    )


_RECOMMENDED = (
    "model",
    "for",
    "precision",
    "loss scale",
    "in FP32",
    "clip norm",
    "tensor cores",
    "expected speed",
    "expected memory",
)


def _recommended_rows(
    recommended: dict[tuple[str, str | None], Recommendation],
) -> Iterator[tuple[str, ...]]:
    for (name, capability), found in recommended.items():
        plan, speed = found.plan, found.speed
        saved = 1 - found.memory_planned.total_bytes / found.memory_fp32.total_bytes
        yield (
            name,
            f"compute capability {capability}" if capability else "this machine",
            plan.precision,
            "–" if plan.loss_scale is None else f"{plan.loss_scale:g}",
            ", ".join(plan.keep_fp32) or "–",
            "–" if plan.clip_norm is None else f"{plan.clip_norm:g}",
            "–" if speed is None else percent(speed.eligible_ratio),
            "–" if speed is None else f"{speed.least_ratio:.2f} to {speed.most_ratio:.2f}",
            f"{round(-100 * saved) + 0:+d} %",
        )


_EVALUATED = (
    "model",
    "plan",
    "speed-up",
    "90 % interval",
    "peak memory, FP32",
    "by the plan",
    "saved",
    "difference of the loss",
    "FP32, last bit apart",
)


def _evaluated_rows(evaluated: dict[str, PlanEvaluation]) -> Iterator[tuple[str, ...]]:
    for name, found in evaluated.items():
        low, high = found.speed_interval
        loss, noise = found.loss_difference_ratio, found.perturbed_difference_ratio
        yield (
            name,
            found.plan.precision,
            f"**{found.speed_ratio:.2f}**",
            f"{low:.2f} to {high:.2f}",
            size(found.fp32_peak_bytes),
            size(found.planned_peak_bytes),
            f"{100 * found.memory_saved_ratio:.0f} %",
            "–" if loss is None else percent(loss),
            "–" if noise is None else percent(noise),
        )


if __name__ == "__main__":
    main()
