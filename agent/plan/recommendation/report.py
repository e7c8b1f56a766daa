"""A recommendation in a terminal."""

from collections.abc import Iterator
from operator import attrgetter

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table as TerminalTable
from rich.text import Text

from mp_agent.plan.precision_plan import Environment
from mp_agent.plan.recommendation.model import GradientFacts, Recommendation
from mp_agent.report import terminal
from mp_agent.report.content import Cell, Table
from mp_agent.report.numbers import percent, scientific, size

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
    console.print(terminal.titled(_reasons(found), title))
    console.print(terminal.heading("considered"))
    considered = [
        (
            one.precision,
            Cell("taken", "good") if one.accepted else Cell("not taken", "warn"),
            one.reason,
        )
        for one in found.considered
    ]
    console.print(terminal.table(Table(("",) * 3, considered, text=range(3))))
    console.print(terminal.heading("hardware and software"))
    console.print(terminal.facts(environment_facts(found.environment)))
    console.print(terminal.heading(f"gradients of {found.gradients.steps} FP32 steps"))
    console.print(terminal.facts(gradient_facts(found.gradients)))
    _print_odd(found, console, rows)
    _print_estimates(found, console)
    if code:
        console.print(terminal.heading("code"))
        console.print(Syntax(found.code(), "python", theme="ansi_dark", background_color="default"))
    terminal.print_notes(console, found.notes)


def _reasons(found: Recommendation) -> TerminalTable:
    table = terminal.grid()
    for reason in found.reasons:
        table.add_row(reason.subject, Text(reason.value, style="bold"), Text(reason.text))
    text = "settings for mp_agent.init, where the defaults do not fit this model"
    for name, value in found.plan.settings.get("thresholds", {}).items():
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
    console.print(terminal.heading("dimensions that tensor cores pad or cannot use"))
    odd = [
        (
            one.module,
            ", ".join(f"{size} → {size + -size % 8}" for size in one.dimensions),
            percent(one.flops_ratio),
        )
        for one in found.odd_modules[:rows]
    ]
    headings = ("module", "no multiple of 8", "share of products")
    console.print(terminal.table(Table(headings, odd, text=range(3))))
    if len(found.odd_modules) > rows:
        console.print(Text(f"and {len(found.odd_modules) - rows} more modules", style="dim"))


def _print_estimates(found: Recommendation, console: Console) -> None:
    console.print(terminal.heading("expected"))
    speed = found.speed
    if speed is None:
        console.print("speed: nothing to estimate from; `mp-agent evaluate` measures it")
    else:
        console.print(
            f"speed: {speed.least_ratio:.2f} to {speed.most_ratio:.2f} times that of FP32 "
            f"({percent(speed.eligible_ratio)} of the products on tensor cores; {speed.source})",
            highlight=False,
        )
    memories = (found.memory_fp32, found.memory_planned)
    rows = [(label, *map(size, map(attrgetter(name), memories))) for name, label in _PARTS.items()]
    headings = ("memory of a step, estimate", "FP32", found.plan.precision)
    console.print(terminal.table(Table(headings, rows)))


def environment_facts(environment: Environment) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the hardware and software; what is not there is left out."""
    hardware = environment.hardware
    detected = "" if hardware.detected else " (given, not detected)"
    yield ("GPU" if hardware.kind == "cuda" else "processor"), hardware.name + detected
    if hardware.kind == "cuda" and hardware.detected:
        yield "GPUs", str(hardware.devices)
    if hardware.compute_capability is not None:
        yield "compute capability", ".".join(map(str, hardware.compute_capability))
    if hardware.tensor_cores is not None:
        yield "tensor cores", "yes" if hardware.tensor_cores else "no"
    known = {True: "yes", False: "no", None: "not known"}
    yield "multiplies", ", ".join(f"{n.upper()}: {known[v]}" for n, v in hardware.formats.items())
    if hardware.memory_bytes is not None:
        free = hardware.memory_free_bytes
        yield (
            "memory",
            size(hardware.memory_bytes) + (f", {size(free)} free" if free else ""),
        )
    for name, version in environment.versions.items():
        if version is not None:
            yield name, version
    yield "products", ", ".join(f"{name} = {value}" for name, value in environment.products.items())
