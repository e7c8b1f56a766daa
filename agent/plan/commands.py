"""`mp-agent compare`, `recommend` and `evaluate`: the precisions of a model before it is trained.

Their help needs no torch: what runs a model is imported where it is called.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mp_agent.backtest.options import period_of_prometheus, period_options
from mp_agent.errors import AdviceError, CompareError, SourceError
from mp_agent.inputs.files import parse_json, read_text
from mp_agent.lint.rules.reinforcement import REINFORCEMENT_IN_BF16
from mp_agent.lint.script import check_script
from mp_agent.output import Console, keep_inputs, write_whole
from mp_agent.plan.comparison.model import TOLERANCE, PrecisionReport
from mp_agent.plan.comparison.report import print_report
from mp_agent.plan.evaluation.model import FORMAT, PlanEvaluation, excluded_by
from mp_agent.plan.evaluation.report import print_evaluation
from mp_agent.plan.gradient_report import GradientReport, print_gradients
from mp_agent.plan.precision_plan import (
    BY_NAME,
    DEFAULT_NAMES,
    GOALS,
    PRECISIONS,
    REFERENCES,
    PrecisionPlan,
    plan_of_json,
)
from mp_agent.plan.recommendation.report import print_recommendation
from mp_agent.plan.target import is_target, load_target, progress_bar, running_own_code
from mp_agent.report.options import (
    FiniteRange,
    Option,
    count_option,
    file_option,
    json_option,
    page_option,
    positive_option,
    show,
)
from mp_agent.runs.baseline import compare_with_baseline, print_comparison
from mp_agent.runs.command import compare_runs, compare_scraped_runs
from mp_agent.version import require_torch

_search_trials = count_option(
    "--search-trials",
    40,
    "Runs at most, for each precision that fails, to find what to keep in FP32; 0: none.",
    least=0,
)

_tolerance = positive_option(
    "--tolerance",
    TOLERANCE,
    "Mean absolute difference of the model's outputs, divided by their RMS, below which a "
    "precision passes.",
)


def _required(choices: tuple[str, ...], help: str) -> Option:
    kind = click.Choice(choices)
    return click.option("--require", "required", multiple=True, type=kind, help=help)


@click.command("compare")
@click.argument("target")
@click.argument("other", required=False)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(tuple(BY_NAME)),
    help=f"A precision to compare; may be repeated. {', '.join(DEFAULT_NAMES)} by default.",
)
@click.option(
    "--reference",
    type=click.Choice(tuple(REFERENCES)),
    default="fp32",
    show_default=True,
    help="What is taken for exact.",
)
@click.option(
    "--gradients",
    is_flag=True,
    help="Compare gradients with finite differences of the loss in FP64, in place of precisions.",
)
@file_option("--baseline", exists=True, help="TARGET is a run: compare it with this baseline.")
@_tolerance
@positive_option(
    "--loss-scale", 1.0, "Factor of the candidate's loss, as GradScaler would have it."
)
@_search_trials
@_required(tuple(BY_NAME), "Exit with 1 unless this precision passes; may be repeated.")
@click.option("--rows", type=click.IntRange(min=1), default=12, help="Modules or steps to print.")
@json_option("result")
@page_option("result")
@click.option(
    "--prometheus",
    default="",
    metavar="URL",
    help="TARGET and OTHER are names of runs that this Prometheus scraped.",
)
@period_of_prometheus("30d")
def compare_command(
    target: str,
    other: str | None,
    dtypes: tuple[str, ...],
    gradients: bool,
    baseline: Path | None,
    required: tuple[str, ...],
    rows: int,
    as_document: bool,
    page: Path | None,
    prometheus: str,
    start: str,
    end: str,
    scrape_interval: str,
    **options: Any,
) -> None:
    """Compare the precisions of a model module by module, or two runs step by step.

    TARGET alone is `script.py:function` or `package.module:function`: it is called without
    arguments and returns (model, batch) or (model, batch, loss); with --gradients, its gradients
    are checked, and the exit code is 1 where they disagree. TARGET and OTHER are two runs:
    flight records, directories of runs in shared memory, or addresses of node agents
    (`http://host:9464`, `…/?run=NAME` where there are several); with --prometheus, their names.
    With --baseline, TARGET is one recorded run, and the exit code is 1 where it differs.
    """
    keep_inputs((target, other, _script_of(target)), page)
    shown: dict[str, Any] = {"rows": rows, "as_document": as_document, "page": page}
    with running_own_code("compare"):
        if gradients:
            if other is not None or prometheus or dtypes or required or page is not None:
                raise CompareError(
                    "--gradients checks one model: not with OTHER, --prometheus, --dtype, "
                    "--require or --html"
                )
            checked = _check_gradients(target)
            if as_document:
                click.echo(checked.as_json())
            else:
                print_gradients(checked, Console(), rows=rows)
            sys.exit(0 if checked.passed else 1)
        if baseline is not None:
            if other is not None or prometheus or gradients or page is not None:
                raise CompareError(
                    "--baseline compares one run: not with OTHER, --prometheus, --gradients or "
                    "--html"
                )
            compared = compare_with_baseline(target, baseline)
            if as_document:
                click.echo(compared.as_json())
            else:
                print_comparison(compared, Console(), rows=rows)
            sys.exit(1 if compared.departures else 0)
        if prometheus:
            if other is None:
                raise CompareError(f"--prometheus compares two runs; {target} is one")
            period = period_options(start, end, scrape_interval)
            compare_scraped_runs(prometheus, (target, other), period, **shown)
            return
        if other is not None:
            compare_runs(target, other, **shown)
            return
        _require_target(target)
        chosen = tuple(dict.fromkeys((*(dtypes or DEFAULT_NAMES), *required)))
        report = _compare(target, dtypes=chosen, **options)
    show(
        json=report.as_json,
        html=report.as_html,
        text=lambda console: print_report(report, console, rows=rows),
        as_document=as_document,
        page=page,
    )
    sys.exit(0 if set(required) <= set(report.passed) else 1)


def _require_target(target: str) -> None:
    if not is_target(target):
        raise CompareError(f"{target}: is no script.py:function; to compare two runs, name both")


def _check_gradients(target: str) -> GradientReport:
    _require_target(target)
    require_torch()
    from mp_agent.plan.gradient_check import check_gradients

    made = load_target(target)
    with progress_bar() as progress:
        return check_gradients(*made, progress=progress)


def _compare(target: str, **options: Any) -> PrecisionReport:
    require_torch()
    from mp_agent.plan.comparison.api import compare

    made = load_target(target)
    with progress_bar() as progress:
        return compare(*made, progress=progress, **options)


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
    "--memory",
    "memory_gib",
    type=FiniteRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory that a training step may take; by default what is free where the plan is for.",
)
@click.option(
    "--reinforcement",
    is_flag=True,
    help="For reinforcement learning, where BF16 is advised against; on where check finds it.",
)
@click.option(
    "--evaluation",
    "evaluation_paths",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="What `mp-agent evaluate --json` has found of this model; may be repeated.",
)
@count_option("--steps", 8, "FP32 steps whose gradients are measured.")
@positive_option("--learning-rate", 1e-4, "Of AdamW in these steps.")
@_tolerance
@_search_trials
@click.option("--rows", type=click.IntRange(min=1), default=8, help="Odd modules to print.")
@json_option("recommendation")
@file_option("--output", help="Write the plan to this file, for `mp-agent evaluate --plan`.")
@file_option("--code", "code_path", help="Write the code to this file.")
def recommend_command(
    target: str,
    rows: int,
    as_document: bool,
    output: Path | None,
    code_path: Path | None,
    goal: str,
    memory_gib: float | None,
    reinforcement: bool,
    evaluation_paths: tuple[Path, ...],
    **options: Any,
) -> None:
    """Recommend a precision for a model, with reasons, settings and code.

    TARGET is `script.py:function` or `package.module:function`: it is called without arguments and
    returns (model, batch) or (model, batch, loss), as for `mp-agent compare`; a DataLoader or an
    iterator in place of the batch gives one batch per step.
    """
    keep_inputs((_script_of(target), *evaluation_paths), output, code_path)
    with running_own_code("recommend"):
        require_torch()
        model, batch, loss = _training_target(target)
        from mp_agent.plan.recommendation.api import recommend_plan

        excluded = dict(pair for path in evaluation_paths for pair in _excluded(path, goal))
        with progress_bar() as progress:
            found = recommend_plan(
                model,
                batch,
                loss,
                goal=goal,
                memory_bytes=None if memory_gib is None else max(1, int(memory_gib * 2**30)),
                reinforcement=reinforcement or _is_reinforcement(target),
                excluded=excluded,
                progress=progress,
                **options,
            )
    if output is not None:
        write_whole(output, found.plan.as_json() + "\n")
    if code_path is not None:
        write_whole(code_path, found.code())
    if as_document:
        click.echo(found.as_json())
    else:
        print_recommendation(found, Console(), rows=rows, code=code_path is None)


def _excluded(path: Path, goal: str) -> Iterator[tuple[str, str]]:
    """Yield the precision that an evaluation in a file has rejected, with the reason.

    Raises AdviceError, naming the file, for what is none.
    """
    try:
        document = parse_json(read_text(path))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        plan = plan_of_json(json.dumps(document))
        rejections = {str(key): str(why) for key, why in document["rejections"].items()}
    except (
        OSError,
        SourceError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise AdviceError(f"{path}: is no evaluation: {error!r}") from error
    yield from excluded_by(plan.precision, rejections, goal).items()


def _is_reinforcement(target: str) -> bool:
    """Return whether check finds reinforcement learning in BF16 in the target's script."""
    path = _script_of(target)
    if not Path(path).is_file():
        return False
    return REINFORCEMENT_IN_BF16.code in check_script(path).counts()


def _script_of(target: str) -> str:
    """Return the part of a target that may be a file."""
    return target.rpartition(":")[0]


def _training_target(target: str) -> tuple[Any, Any, Any]:
    if not is_target(target):
        raise AdviceError(f"{target}: is no script.py:function")
    return load_target(target)


_FIRST_SCALE = 65536.0
"""GradScaler's own default, for a precision without a plan."""


@click.command("evaluate")
@click.argument("target")
@file_option(
    "--plan",
    "plan_path",
    exists=True,
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
@count_option("--steps", 50, "Steps to train.")
@count_option("--warmup-steps", 5, "First steps, which speed leaves out.", least=0)
@positive_option("--learning-rate", 1e-4, "Of AdamW.")
@_required(("speed", "memory", "loss"), "Exit with 1 unless this target is met; may be repeated.")
@file_option("--output", help="Write the plan that was measured last to this file.")
@json_option("evaluation")
@page_option("evaluation")
def evaluate_command(
    target: str,
    plan_path: Path | None,
    precision: str | None,
    goal: str,
    required: tuple[str, ...],
    output: Path | None,
    as_document: bool,
    page: Path | None,
    **options: Any,
) -> None:
    """Train a model in FP32 and by a plan, by turns, and measure speed, memory and loss.

    TARGET is `script.py:function`, as for `mp-agent recommend`. Both trainings begin with the same
    weights and see the same batches and random numbers; the optimizer is AdamW. A plan that was
    recommended and does not hold gives way to the next one, which is measured in its place.
    """
    keep_inputs((_script_of(target),), output, page)
    with running_own_code("evaluate"):
        require_torch()
        found = _evaluate(target, _given_plan(plan_path, precision), goal, **options)
    if output is not None:
        write_whole(output, found.plan.as_json() + "\n")
    show(
        json=found.as_json,
        html=found.as_html,
        text=lambda console: print_evaluation(found, console),
        as_document=as_document,
        page=page,
    )
    sys.exit(1 if set(required) & set(found.missed) else 0)


def _given_plan(path: Path | None, precision: str | None) -> PrecisionPlan | None:
    if path is not None and precision is not None:
        raise AdviceError("--plan and --precision: give one of them")
    if path is not None:
        try:
            return plan_of_json(read_text(path))
        except OSError as error:
            raise AdviceError(f"{path}: cannot be read: {error}") from error
    if precision is None:
        return None
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = _FIRST_SCALE if precision == "fp16-autocast" else None
    return PrecisionPlan(precision=precision, device=device, loss_scale=scale)


def _evaluate(
    target: str,
    plan: PrecisionPlan | None,
    goal: str,
    steps: int,
    learning_rate: float,
    **more: Any,
) -> PlanEvaluation:
    model, batch, loss = _training_target(target)
    from mp_agent.plan.evaluation.api import measure_plan
    from mp_agent.plan.execution.session import batches_of
    from mp_agent.plan.recommendation.api import recommend_plan

    batches = batches_of(batch, steps)

    def again() -> Any:
        # An iterator can be read once, but is needed twice.
        return batches[0] if len(batches) == 1 else iter(batches)

    def measured(chosen: PrecisionPlan) -> PlanEvaluation:
        return measure_plan(
            model,
            again(),
            loss,
            chosen,
            steps=steps,
            learning_rate=learning_rate,
            progress=progress,
            **more,
        )

    excluded: dict[str, str] = {}
    with progress_bar() as progress:
        if plan is not None:
            return measured(plan)
        while True:
            plan = recommend_plan(
                model,
                again(),
                loss,
                goal=goal,
                reinforcement=_is_reinforcement(target),
                learning_rate=learning_rate,
                excluded=excluded,
                progress=progress,
            ).plan
            found = measured(plan)
            if not (rejected := found.excluded(goal)):
                changed = (
                    f"{name} was recommended before; {why}" for name, why in excluded.items()
                )
                return replace(found, notes=(*changed, *found.notes))
            excluded |= rejected
