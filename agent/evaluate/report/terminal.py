"""The evaluation as tables for a terminal."""

from statistics import fmean, median

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mp_agent.advice.plan import PrecisionPlan
from mp_agent.advice.report.model import size_text
from mp_agent.compare.report.text import scientific
from mp_agent.evaluate.report.model import Outcome, PlanEvaluation, SideMeasurement


def verdict(evaluation: PlanEvaluation) -> str:
    """Return in one sentence which targets are met."""
    missed = evaluation.missed
    if not missed:
        return "Every target that was measured is met."
    return f"Missed: {', '.join(missed)}."


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


def measured_rows(evaluation: PlanEvaluation) -> list[tuple[str, str, str]]:
    """Return (name, in FP32, by the plan) of what was measured."""
    exact, planned = evaluation.fp32, evaluation.planned
    return [
        ("step, median", _step_text(exact, evaluation), _step_text(planned, evaluation)),
        (
            "peak memory",
            size_text(evaluation.fp32_peak_bytes),
            size_text(evaluation.planned_peak_bytes),
        ),
        ("first loss", f"{exact.losses[0]:.6g}", f"{planned.losses[0]:.6g}"),
        ("loss of the last fifth", _tail_text(exact), _tail_text(planned)),
        ("skipped steps", "–", str(planned.skipped_steps) if planned.loss_scales else "–"),
    ]


def _step_text(side: SideMeasurement, evaluation: PlanEvaluation) -> str:
    return f"{scientific(1000 * median(side.seconds[evaluation.warmup_steps :]))} ms"


def _tail_text(side: SideMeasurement) -> str:
    return f"{fmean(side.losses[-max(1, len(side.losses) // 5) :]):.6g}"


_STYLES = {Outcome.MET: "bold green", Outcome.MISSED: "bold red", Outcome.NOT_MEASURED: "dim"}


def print_evaluation(found: PlanEvaluation, console: Console) -> None:
    """Print targets and measurements."""
    table = _table("", "target", "measured")
    for one in found.targets:
        mark = Text(one.outcome.value, style=_STYLES[one.outcome])
        table.add_row(mark, one.target, one.value)
    title = f"{found.model}, {found.parameters:,} parameters, {found.steps} steps"
    console.print(Panel(table, title=Text(title), title_align="left", expand=False))
    console.print(Text(verdict(found)))
    console.print(Text(f"plan: {plan_text(found.plan)}"))
    console.print(Text(f"on: {found.environment.hardware.name}"))
    measured = _table("", "FP32", found.plan.precision)
    for name, before, after in measured_rows(found):
        measured.add_row(name, before, after)
    console.print(measured)
    console.print(Text(f"Memory is that of {found.memory_source}.", style="dim"))
    for note in found.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
