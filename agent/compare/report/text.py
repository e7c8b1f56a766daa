"""Numbers, names and verdicts as every form of a report writes them."""

from collections.abc import Sequence
from math import isfinite, isnan

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mp_agent.compare.report.model import (
    CandidateComparison,
    ErrorRole,
    ModuleSummary,
    PrecisionReport,
    TensorError,
    Verdict,
    module_summaries,
)

MODEL = "(model)"
"""The model itself, whose name among its modules is empty."""


def named(module: str) -> str:
    """Return the name of a module as it is shown."""
    return module or MODEL


def scientific(value: float | None) -> str:
    """Return a number with three digits; "–" for none."""
    if value is None or isnan(value):
        return "–"
    if not isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def percent(ratio: float) -> str:
    """Return a share, without pretending that a small one is none."""
    if ratio == 0:
        return "0 %"
    if ratio < 1e-4:
        return "< 0.01 %"
    return f"{100 * ratio:.2f} %" if ratio < 0.01 else f"{100 * ratio:.3g} %"


def cosine_text(value: float) -> str:
    """Return a cosine: how far it is from 1 where it is close."""
    return f"{value:.4f}" if value < 0.9995 else f"1 − {scientific(1 - value)}"


def verdict_text(verdict: Verdict, tolerance: float) -> str:
    """Return a verdict in one sentence."""
    if verdict.passed:
        return f"passes: mean absolute difference {scientific(verdict.mean_abs)} < {tolerance:g}"
    return f"fails: {'; '.join(verdict.reasons)}"


def keep_text(candidate: CandidateComparison) -> str:
    """Return in one sentence which modules have to stay in FP32; "" where nothing was searched."""
    keep = candidate.keep
    if keep is None:
        return ""
    if not keep.found:
        return f"No set of modules in FP32 was found with which it passes ({keep.trials} trials)."
    names = ", ".join(map(named, keep.kept))
    proof = (
        ""
        if keep.verdict is None
        else "; compared again with them, it "
        + (f"passes ({scientific(keep.verdict.mean_abs)})" if keep.verdict.passed else "fails")
    )
    least = "" if keep.minimal else ", though fewer may do: the trials ran out"
    return f"Keep in FP32: {names}{proof}{least}."


def verdict_of(
    outputs: Sequence[TensorError],
    losses: tuple[float | None, float | None],
    gradients_finite: bool,
    tolerance: float,
    failure: str = "",
) -> Verdict:
    """Return the verdict on what the model returned.

    losses: the reference's and the candidate's. It passes if the mean absolute difference of what
    the model returns is below the tolerance, and if outputs, loss and gradients of the parameters
    are finite wherever those of the reference are.
    """
    mean_abs = max((one.mean_abs for one in outputs), default=0.0)
    lost = max((one.nonfinite_ratio for one in outputs), default=0.0)
    reasons = []
    if failure:
        reasons.append(failure)
    if lost > 0:
        reasons.append(f"{percent(lost)} of the model's outputs are NaN or Inf")
    if mean_abs >= tolerance:
        reasons.append(f"mean absolute difference {scientific(mean_abs)} ≥ {tolerance:g}")
    reference, candidate = losses
    if reference is not None and not isfinite(reference):
        reasons.append("the loss of the reference is NaN or Inf")
    elif candidate is not None and not isfinite(candidate):
        reasons.append("the loss is NaN or Inf")
    if not gradients_finite:
        reasons.append("gradients of parameters are NaN or Inf")
    if not failure and not any(one.elements for one in outputs) and candidate is None:
        reasons.append("the model returned nothing to compare")
    return Verdict(passed=not reasons, reasons=tuple(reasons), mean_abs=mean_abs)


_ROWS = 12
_WIDE = 110
"""Characters."""
_ROLE_STYLES = {ErrorRole.BEGINS: "red", ErrorRole.AMPLIFIED: "yellow"}


def print_report(report: PrecisionReport, console: Console, *, rows: int = _ROWS) -> None:
    """Print the verdicts, then each candidate with its worst modules; rows: at most so many."""
    console.print(_summary(report))
    for candidate in report.candidates:
        _print_candidate(candidate, report, console, rows)
    for note in report.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def _summary(report: PrecisionReport) -> Panel:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("precision", "verdict", "mean abs", "relative L2", "cosine", "loss"):
        table.add_column(
            heading, justify="left" if heading in ("precision", "verdict") else "right"
        )
    for one in report.candidates:
        passed = one.verdict.passed
        output = one.output
        table.add_row(
            one.name,
            Text("passes" if passed else "fails", style="bold green" if passed else "bold red"),
            scientific(one.verdict.mean_abs) if output else "–",
            scientific(output.relative_l2) if output else "–",
            cosine_text(output.cosine) if output else "–",
            "–" if one.candidate_loss is None else f"{one.candidate_loss:.6g}",
        )
    losses = [one.reference_loss for one in report.candidates if one.reference_loss is not None]
    loss = f", loss {losses[0]:.6g}" if losses else ""
    title = f"{report.model}, {report.parameters:,} parameters, against {report.reference}{loss}"
    return Panel(table, title=Text(title), title_align="left", expand=False)


def _print_candidate(
    candidate: CandidateComparison, report: PrecisionReport, console: Console, rows: int
) -> None:
    console.print(Rule(Text(candidate.name, style="bold"), align="left"))
    style = "green" if candidate.verdict.passed else "red"
    console.print(Text(verdict_text(candidate.verdict, report.tolerance), style=style))
    if keep := keep_text(candidate):
        console.print(Text(keep))
    for number, origin in enumerate(candidate.origins[:5], 1):
        line = Text.assemble(f"{number}. ", (origin.module, "bold"), f": {origin.kind.value}: ")
        console.print(Padding(line + Text(origin.text), (0, 0, 0, 2)))
    summaries = module_summaries(candidate.calls)
    if summaries:
        console.print(_modules(_shown(summaries, rows), console.width))
        if len(summaries) > rows:
            console.print(Text(f"and {len(summaries) - rows} more modules", style="dim"))
    for note in candidate.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def _shown(summaries: Sequence[ModuleSummary], rows: int) -> list[ModuleSummary]:
    """Return the modules that lose most by themselves, in the order of execution."""

    def own(summary: ModuleSummary) -> tuple[float, float]:
        error = summary.own or summary.worst.output
        return (error.nonfinite_ratio, error.relative_l2)

    chosen = {one.module for one in sorted(summaries, key=own, reverse=True)[:rows]}
    return [one for one in summaries if one.module in chosen]


def _modules(summaries: Sequence[ModuleSummary], width: int) -> Table:
    """Return the table of some modules; a narrow terminal shows the columns that matter most."""
    headings = ["module", "read", "own", "total", "error", "lost"]
    if width >= _WIDE:
        headings += ["ULPs", "gradient", "class"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        number = heading in ("read", "own", "total", "ULPs", "gradient")
        table.add_column(
            heading,
            justify="right" if number else "left",
            no_wrap=heading != "module",
            min_width=16 if heading == "module" else None,
            overflow="fold",
        )
    for one in summaries:
        output = one.worst.output
        cells: list[str | Text] = [
            Text(named(one.module)),
            scientific(one.worst.input_error),
            _relative(one.own),
            _relative(output),
            Text(one.role.value, style=_ROLE_STYLES.get(one.role, "")),
            lost_text(output),
            scientific(output.ulps_mean),
            _relative(one.gradient),
            Text(one.kind),
        ]
        table.add_row(*cells[: len(headings)])
    return table


def _relative(error: TensorError | None) -> str:
    return "–" if error is None else scientific(error.relative_l2)


def lost_text(error: TensorError) -> str:
    """Return the shares of elements that overflow and underflow."""
    if error.nonfinite_ratio > 0:
        return f"{percent(error.nonfinite_ratio)} NaN/Inf"
    return f"{percent(error.underflow_ratio)} to 0" if error.underflow_ratio > 0 else ""
