"""An evaluation for people: in a terminal, and as a page."""

from collections.abc import Sequence
from statistics import fmean, median

from rich.console import Console
from rich.text import Text

from mp_agent.plan.evaluation.model import (
    LOSS_DIFFERENCE_RATIO,
    Outcome,
    PlanEvaluation,
    SideMeasurement,
    relative_differences,
)
from mp_agent.plan.precision_plan import PrecisionPlan
from mp_agent.plan.recommendation.report import environment_facts
from mp_agent.report import terminal
from mp_agent.report.content import Cell, Curve, Plot, Plots, Table, Values
from mp_agent.report.numbers import NONE, finite, number, scientific, size
from mp_agent.report.page import render


def verdict(evaluation: PlanEvaluation) -> str:
    """Return in one sentence which targets are met."""
    missed = evaluation.missed
    text = f"Missed: {', '.join(missed)}." if missed else "Every target that was measured is met."
    reasons: dict[str, list[str]] = {}
    for goal, why in evaluation.rejections.items():
        reasons.setdefault(why, []).append(goal)
    return " ".join(
        (text, *(f"Not to be used for {', '.join(of)}: {why}." for why, of in reasons.items()))
    )


def plan_text(plan: PrecisionPlan) -> str:
    """Return a plan in one line."""
    parts = [plan.precision]
    if plan.loss_scale is not None:
        parts.append(f"loss scale {plan.loss_scale:g} at first")
    if plan.keep_fp32:
        parts.append(f"in FP32: {', '.join(plan.keep_fp32)}")
    parts.append(f"epsilon {plan.adam_epsilon:g}")
    parts.append("no clipping" if plan.clip_norm is None else f"clip norm {plan.clip_norm:g}")
    return "; ".join(parts)


_TONES = {Outcome.MET: "good", Outcome.MISSED: "bad", Outcome.NOT_MEASURED: ""}


def targets_table(evaluation: PlanEvaluation, *, tags: bool = False) -> Table:
    """Return the targets, with whether each is met."""
    rows = [
        (Cell(one.outcome.value, _TONES[one.outcome], tags), one.target, one.value)
        for one in evaluation.targets
    ]
    return Table(("result", "target", "measured"), rows, "targets", text=range(3))


def measured_table(evaluation: PlanEvaluation) -> Table:
    """Return what was measured, in FP32 and by the plan."""
    exact, planned = evaluation.fp32, evaluation.planned
    rows = [
        ("step, median", _step_text(exact, evaluation), _step_text(planned, evaluation)),
        (
            "peak memory",
            size(evaluation.fp32_peak_bytes),
            size(evaluation.planned_peak_bytes),
        ),
        ("first loss", number(exact.losses[0], 6), number(planned.losses[0], 6)),
        ("loss of the last fifth", _tail_text(exact), _tail_text(planned)),
        ("skipped steps", NONE, str(planned.skipped_steps) if planned.loss_scales else NONE),
    ]
    return Table(("quantity", "FP32", evaluation.plan.precision), rows, "measurements")


def _step_text(side: SideMeasurement, evaluation: PlanEvaluation) -> str:
    return f"{scientific(1000 * median(side.seconds[evaluation.warmup_steps :]))} ms"


def _tail_text(side: SideMeasurement) -> str:
    return number(fmean(side.losses[-max(1, len(side.losses) // 5) :]), 6)


def print_evaluation(found: PlanEvaluation, console: Console) -> None:
    """Print targets and measurements."""
    title = f"{found.model}, {found.parameters:,} parameters, {found.steps} steps"
    console.print(terminal.titled(terminal.table(targets_table(found)), title))
    console.print(Text(verdict(found)))
    console.print(Text(f"plan: {plan_text(found.plan)}"))
    console.print(Text(f"on: {found.environment.hardware.name}"))
    console.print(terminal.table(measured_table(found)))
    console.print(Text(f"Memory is that of {found.memory_source}.", style="dim"))
    terminal.print_notes(console, found.notes)


def as_html(evaluation: PlanEvaluation) -> str:
    """Return the evaluation as one page that loads nothing."""
    precision = evaluation.plan.precision
    training = f"{evaluation.steps} with AdamW, learning rate {evaluation.learning_rate}"
    return render(
        "evaluation",
        tool="evaluate",
        title=f"{precision} for {evaluation.model}",
        verdict=verdict(evaluation),
        good=not evaluation.missed,
        facts=(
            ("plan", plan_text(evaluation.plan)),
            ("parameters", f"{evaluation.parameters:,}"),
            ("steps", training),
            *environment_facts(evaluation.environment),
        ),
        plots=[plots_of(evaluation)],
        targets=targets_table(evaluation, tags=True),
        measured=measured_table(evaluation),
        memory_source=evaluation.memory_source,
        notes=evaluation.notes,
    )


def plots_of(evaluation: PlanEvaluation) -> Plots:
    """Return the curves of both trainings."""
    exact, planned, perturbed = evaluation.fp32, evaluation.planned, evaluation.perturbed
    plots = [
        Plot(
            id="loss",
            title="Loss",
            caption="from the same weights, batches and random numbers",
            curves=_pair(evaluation, finite(exact.losses), finite(planned.losses)),
        ),
        Plot(
            id="difference",
            title="Difference of the loss",
            caption="from FP32, relative, logarithmic; the dashed line is the target",
            curves=[
                Curve(
                    evaluation.plan.precision,
                    relative_differences(planned.losses, exact.losses),
                    "bad",
                ),
                Curve(
                    "FP32 from weights one last bit apart",
                    relative_differences(perturbed.losses, exact.losses),
                ),
            ],
            log=10,
            limits=[(LOSS_DIFFERENCE_RATIO, "")],
        ),
        Plot(
            id="time",
            title="Time of a step",
            caption=f"milliseconds; the first {evaluation.warmup_steps} do not count",
            curves=_pair(
                evaluation,
                [1000 * one for one in exact.seconds],
                [1000 * one for one in planned.seconds],
            ),
        ),
    ]
    if planned.loss_scales:
        plots.append(
            Plot(
                id="scale",
                title="Loss scale",
                caption="after each step, logarithmic",
                curves=[Curve("loss scale", finite(planned.loss_scales[1:]), "bad")],
                log=2,
            )
        )
    return Plots(places=range(1, evaluation.steps + 1), plots=plots)


def _pair(evaluation: PlanEvaluation, exact: Values, planned: Values) -> Sequence[Curve]:
    return [Curve("FP32", exact), Curve(evaluation.plan.precision, planned, "bad")]
