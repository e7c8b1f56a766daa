"""Prints an evaluation in the terminal."""

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mp_agent.evaluate.report.model import PlanEvaluation
from mp_agent.evaluate.report.rows import measured_rows, plan_text, verdict
from mp_agent.evaluate.targets import Outcome

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
