"""`mp-agent evaluate`: measures a precision plan against FP32."""

import sys
from pathlib import Path
from typing import Any

import click

from mp_agent.advice.plan import PRECISIONS, PrecisionPlan, plan_of_json
from mp_agent.advice.report.model import GOALS
from mp_agent.compare.target import is_target, load_target, progress_bar
from mp_agent.errors import AdviceError, MpAgentError
from mp_agent.evaluate.report.model import PlanEvaluation, as_json
from mp_agent.evaluate.report.terminal import print_evaluation
from mp_agent.output import Console, write_whole
from mp_agent.version import require_torch

_WRONG_USE = 2
_REQUIRABLE = ("speed", "memory", "loss")
_FIRST_SCALE = 65536.0
"""GradScaler's own default, for a precision without a plan."""


@click.command("evaluate")
@click.argument("target")
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A plan that `mp-agent recommend --output` wrote; by default one is recommended first.",
)
@click.option(
    "--precision",
    type=click.Choice(tuple(PRECISIONS)),
    help="Measure this precision, without a plan.",
)
@click.option(
    "--goal",
    type=click.Choice(GOALS),
    default="speed",
    show_default=True,
    help="Of the plan that is recommended without --plan and --precision.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Steps to train."
)
@click.option(
    "--warmup-steps",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="First steps, which speed leaves out.",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=1e-4,
    show_default=True,
    help="Of AdamW.",
)
@click.option(
    "--require",
    "required",
    multiple=True,
    type=click.Choice(_REQUIRABLE),
    help="Exit with 1 unless this target is met; may be repeated.",
)
@click.option("--json", "as_document", is_flag=True, help="Print the evaluation as JSON.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the evaluation, with plots, to one HTML file.",
)
def evaluate_command(
    target: str,
    plan_path: Path | None,
    precision: str | None,
    goal: str,
    steps: int,
    warmup_steps: int,
    learning_rate: float,
    required: tuple[str, ...],
    as_document: bool,
    page: Path | None,
) -> None:
    """Train a model in FP32 and by a plan, by turns, and measure speed, memory and loss.

    TARGET is `script.py:function`, as for `mp-agent recommend`. Both trainings begin with the same
    weights and see the same batches and random numbers; the optimizer is AdamW.
    """
    try:
        require_torch()
        plan = _given_plan(plan_path, precision)
        found = _evaluate(target, plan, goal, steps, warmup_steps, learning_rate)
    except MpAgentError as error:
        click.echo(f"mp-agent evaluate: {error}", err=True)
        sys.exit(_WRONG_USE)
    if page is not None:
        write_whole(page, found.as_html())
    if as_document:
        click.echo(as_json(found))
    elif page is not None:
        click.echo(str(page))
    else:
        print_evaluation(found, Console())
    sys.exit(1 if set(required) & set(found.missed) else 0)


def _given_plan(path: Path | None, precision: str | None) -> PrecisionPlan | None:
    if path is not None and precision is not None:
        raise AdviceError("--plan and --precision: give one of them")
    if path is not None:
        try:
            return plan_of_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise AdviceError(f"{path}: cannot be read: {error}") from error
    if precision is None:
        return None
    scale = _FIRST_SCALE if precision == "fp16-autocast" else None
    return PrecisionPlan(precision=precision, device=_device(), loss_scale=scale)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _evaluate(
    target: str,
    plan: PrecisionPlan | None,
    goal: str,
    steps: int,
    warmup_steps: int,
    learning_rate: float,
) -> PlanEvaluation:
    if not is_target(target):
        raise AdviceError(f"{target}: is no script.py:function")
    # Only here: the help needs no torch.
    from mp_agent.advice.api import recommend_plan
    from mp_agent.advice.training import batches_of
    from mp_agent.evaluate.api import measure_plan

    model, batch, loss = load_target(target)
    # An iterator can be read once, but is needed twice.
    batches = batches_of(batch, steps)
    again: Any = batches[0] if len(batches) == 1 else iter(batches)
    with progress_bar() as progress:
        if plan is None:
            found = recommend_plan(
                model, again, loss, goal=goal, learning_rate=learning_rate, progress=progress
            )
            plan = found.plan
            again = batches[0] if len(batches) == 1 else iter(batches)
        return measure_plan(
            model,
            again,
            loss,
            plan,
            steps=steps,
            warmup_steps=warmup_steps,
            learning_rate=learning_rate,
            progress=progress,
        )
