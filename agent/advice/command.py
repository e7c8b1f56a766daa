"""`mp-agent recommend`: a precision plan for a model on this hardware."""

import sys
from pathlib import Path

import click

from mp_agent.advice.report.model import GOALS, Recommendation, as_json
from mp_agent.advice.report.terminal import print_recommendation
from mp_agent.compare.target import is_target, load_target, progress_bar
from mp_agent.errors import AdviceError, MpAgentError
from mp_agent.output import Console, write_whole
from mp_agent.version import require_torch

_WRONG_USE = 2


@click.command("recommend")
@click.argument("target")
@click.option(
    "--goal",
    type=click.Choice(GOALS),
    default="speed",
    show_default=True,
    help="What to prefer among the precisions that pass.",
)
@click.option(
    "--capability",
    metavar="MAJOR.MINOR",
    help="Plan for a GPU of this compute capability, such as 8.0, which is not here.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="FP32 steps whose gradients are measured.",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=1e-4,
    show_default=True,
    help="Of AdamW in these steps.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=0.05,
    show_default=True,
    help="Mean absolute difference of the model's outputs, divided by their RMS, below which a "
    "precision passes.",
)
@click.option(
    "--search-trials",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Runs at most, for each precision that fails, to find what to keep in FP32; 0: none.",
)
@click.option("--rows", type=click.IntRange(min=1), default=8, help="Odd modules to print.")
@click.option("--json", "as_document", is_flag=True, help="Print the recommendation as JSON.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan to this file, for `mp-agent evaluate --plan`.",
)
@click.option(
    "--code",
    "code_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the code to this file.",
)
def recommend_command(
    target: str,
    goal: str,
    capability: str | None,
    steps: int,
    learning_rate: float,
    tolerance: float,
    search_trials: int,
    rows: int,
    as_document: bool,
    output: Path | None,
    code_path: Path | None,
) -> None:
    """Recommend a precision for a model, with reasons, settings and code.

    TARGET is `script.py:function` or `package.module:function`: it is called without arguments and
    returns (model, batch) or (model, batch, loss), as for `mp-agent compare`; a DataLoader or an
    iterator in place of the batch gives one batch per step.
    """
    try:
        found = recommend_target(
            target,
            goal=goal,
            capability=capability,
            steps=steps,
            learning_rate=learning_rate,
            tolerance=tolerance,
            search_trials=search_trials,
        )
    except MpAgentError as error:
        click.echo(f"mp-agent recommend: {error}", err=True)
        sys.exit(_WRONG_USE)
    if output is not None:
        write_whole(output, found.plan.as_json() + "\n")
    if code_path is not None:
        write_whole(code_path, found.code())
    if as_document:
        click.echo(as_json(found))
    else:
        print_recommendation(found, Console(), rows=rows, code=code_path is None)


def recommend_target(
    target: str,
    *,
    goal: str,
    capability: str | None,
    steps: int,
    learning_rate: float,
    tolerance: float,
    search_trials: int,
) -> Recommendation:
    """Load a target and recommend a plan for it, with a progress bar on a terminal."""
    if not is_target(target):
        raise AdviceError(f"{target}: is no script.py:function")
    require_torch()
    # Only here: the help needs no torch.
    from mp_agent.advice.api import recommend_plan

    model, batch, loss = load_target(target)
    with progress_bar() as progress:
        return recommend_plan(
            model,
            batch,
            loss,
            goal=goal,
            capability=capability,
            steps=steps,
            learning_rate=learning_rate,
            tolerance=tolerance,
            search_trials=search_trials,
            progress=progress,
        )
