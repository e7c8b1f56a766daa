"""Prints a recommendation in the terminal."""

from collections.abc import Iterator

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from mp_agent.advice.report.model import (
    GradientFacts,
    Recommendation,
    TrainingMemory,
    environment_facts,
    size_text,
)
from mp_agent.compare.report.text import percent, scientific

_ROWS = 8
_PARTS = {
    "weights_bytes": "weights",
    "casts_bytes": "16-bit copies of weights",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "Adam's moments",
    "activations_bytes": "saved for backward",
    "total_bytes": "total",
}


def print_recommendation(
    found: Recommendation, console: Console, *, rows: int = _ROWS, code: bool = True
) -> None:
    """Print plan, reasons, hardware, estimates and code; rows: odd modules at most."""
    title = f"{found.model}, {found.parameters:,} parameters, for {found.goal}"
    console.print(Panel(_reasons(found), title=Text(title), title_align="left", expand=False))
    _heading(console, "considered")
    table = _table()
    for one in found.considered:
        mark = Text("taken", style="green") if one.accepted else Text("not taken", style="yellow")
        table.add_row(one.precision, mark, Text(one.reason))
    console.print(table)
    _heading(console, "hardware and software")
    console.print(_facts(environment_facts(found.environment)))
    _heading(console, f"gradients of {found.gradients.steps} FP32 steps")
    console.print(_facts(gradient_facts(found.gradients)))
    _print_odd(found, console, rows)
    _print_estimates(found, console)
    if code:
        _heading(console, "code")
        console.print(Syntax(found.code(), "python", theme="ansi_dark", background_color="default"))
    for note in found.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def _reasons(found: Recommendation) -> Table:
    table = _table()
    for reason in found.reasons:
        table.add_row(reason.subject, Text(reason.value, style="bold"), Text(reason.text))
    if found.plan.settings:
        text = "settings for mp_agent.init, where the defaults do not fit this model"
        for name, value in found.plan.settings["thresholds"].items():
            table.add_row("threshold", Text(f"{name} = {value:g}", style="bold"), Text(text))
            text = ""
    return table


def gradient_facts(facts: GradientFacts) -> Iterator[tuple[str, str]]:
    """Yield names and texts of what the gradients showed."""
    yield "norms", f"{min(facts.norms):.3g} to {max(facts.norms):.3g}"
    yield "losses", f"{facts.losses[0]:.5g} to {facts.losses[-1]:.5g}"
    yield "largest gradient", scientific(facts.abs_max)
    if facts.smallest_exponent is not None:
        yield "smallest gradient", f"2^{facts.smallest_exponent}, of parameters, not zero"
    yield "zero in FP32", percent(facts.zero_ratio)
    lost = f"{percent(facts.fp16_lost_ratio)} without a loss scale"
    if facts.fp16_lost_scaled_ratio is not None:
        lost += f", {percent(facts.fp16_lost_scaled_ratio)} with the one above"
    if facts.activation_lost_scaled_ratio is not None:
        lost += f" ({percent(facts.activation_lost_scaled_ratio)} of those of module outputs)"
    yield "zero in FP16", lost
    if facts.bf16_stale_ratio is not None:
        yield "updates lost", f"{percent(facts.bf16_stale_ratio)} if weights were in BF16"


def _print_odd(found: Recommendation, console: Console, rows: int) -> None:
    if not found.odd_modules:
        return
    _heading(console, "dimensions that tensor cores pad or cannot use")
    table = _table("module", "no multiple of 8", "share of products")
    for one in found.odd_modules[:rows]:
        sizes = ", ".join(f"{size} → {size + -size % 8}" for size in one.dimensions)
        table.add_row(Text(one.module), sizes, percent(one.flops_ratio))
    console.print(table)
    if len(found.odd_modules) > rows:
        console.print(Text(f"and {len(found.odd_modules) - rows} more modules", style="dim"))


def _print_estimates(found: Recommendation, console: Console) -> None:
    _heading(console, "expected")
    speed = found.speed
    if speed is None:
        console.print("speed: nothing to estimate from; `mp-agent evaluate` measures it")
    else:
        console.print(
            f"speed: {speed.least_ratio:.2f} to {speed.most_ratio:.2f} times that of FP32 "
            f"({percent(speed.eligible_ratio)} of the products on tensor cores; {speed.source})",
            highlight=False,
        )
    table = _table("memory of a step, estimate", "FP32", found.plan.precision)
    for name, label in _PARTS.items():
        before, after = _part(found.memory_fp32, name), _part(found.memory_planned, name)
        table.add_row(label, size_text(before), size_text(after))
    console.print(table)


def _part(memory: TrainingMemory, name: str) -> int:
    return int(getattr(memory, name))


def _heading(console: Console, text: str) -> None:
    console.print(Rule(Text(text, style="bold"), align="left"))


def _facts(pairs: Iterator[tuple[str, str]]) -> Table:
    table = _table()
    for name, text in pairs:
        table.add_row(name, Text(text))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=bool(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
