"""A comparison of precisions for people: in a terminal, and as a page."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as TerminalTable
from rich.text import Text

from mp_agent.plan.comparison.model import (
    CallComparison,
    CandidateComparison,
    ErrorRole,
    ModuleSummary,
    OriginKind,
    PrecisionReport,
    TensorError,
    Verdict,
    badness,
    difference_text,
    graded_loss,
    module_summaries,
    named,
)
from mp_agent.report import terminal
from mp_agent.report.content import Cell, Curve, Plot, Plots, Table, Values
from mp_agent.report.numbers import NONE, finite, number, percent, scientific
from mp_agent.report.page import render


def cosine_text(value: float) -> str:
    """Return a cosine: how far it is from 1 where it is close."""
    return f"{value:.4f}" if value < 0.9995 else f"1 − {scientific(1 - value)}"


def verdict_text(verdict: Verdict, tolerance: float) -> str:
    """Return a verdict in one sentence."""
    if verdict.passed:
        return (
            f"passes: {difference_text(verdict.mean_abs, verdict.relative)} < {percent(tolerance)}"
        )
    return f"fails: {'; '.join(verdict.reasons)}"


def keep_text(candidate: CandidateComparison) -> str:
    """Return in one sentence which modules have to stay in FP32; "" where nothing was searched."""
    keep = candidate.keep
    if keep is None:
        return ""
    if not keep.found:
        return f"No set of modules in FP32 was found with which it passes ({keep.trials} trials)."
    if "" in keep.kept:
        return "It passes with the whole model in FP32, and with nothing less that was tried."
    names = ", ".join(map(named, keep.kept))
    proof = (
        ""
        if keep.verdict is None
        else "; compared again with them, it "
        + (f"passes ({percent(keep.verdict.relative)})" if keep.verdict.passed else "fails")
    )
    least = "" if keep.minimal else ", though fewer may do: the trials ran out"
    return f"Keep in FP32: {names}{proof}{least}."


_ROWS = 12
_WIDE = 110
"""Width in characters."""


def print_report(report: PrecisionReport, console: Console, *, rows: int = _ROWS) -> None:
    """Print the verdicts, then each candidate with its worst modules; rows: at most so many."""
    losses = [one.reference_loss for one in report.candidates if one.reference_loss is not None]
    loss = f", loss {number(losses[0], 6)}" if losses else ""
    title = f"{report.model}, {report.parameters:,} parameters, against {report.reference}{loss}"
    console.print(terminal.titled(terminal.table(_summary(report)), title))
    for candidate in report.candidates:
        _print_candidate(candidate, report, console, rows)
    terminal.print_notes(console, report.notes)


def _summary(report: PrecisionReport) -> Table:
    rows = []
    for one in report.candidates:
        mean, relative, cosine, *_, loss = _measured(one)
        rows.append((one.name, _result(one, tag=False), mean, relative, cosine, loss))
    return Table(("precision", "verdict", *_MEASURED[:3], "loss"), rows, text=(0, 1))


def _result(one: CandidateComparison, *, tag: bool) -> Cell:
    passed = one.verdict.passed
    return Cell("passes" if passed else "fails", "good" if passed else "bad", tag)


def _measured(one: CandidateComparison) -> tuple[str, ...]:
    """Return what was measured of a candidate, in the order of `_MEASURED`."""
    output = one.output
    grade = graded_loss(one.reference_loss, one.candidate_loss)
    losses = (number(one.reference_loss, 6), number(one.candidate_loss, 6) + grade)
    if output is None:
        return (*[NONE] * 5, *losses)
    differences = (
        (
            scientific(one.verdict.mean_abs),
            scientific(output.relative_l2),
            cosine_text(output.cosine),
        )
        if output.is_compared
        else (NONE, NONE, NONE)
    )
    return (
        *differences,
        percent(output.nonfinite_ratio),
        percent(output.underflow_ratio),
        *losses,
    )


def _print_candidate(
    candidate: CandidateComparison, report: PrecisionReport, console: Console, rows: int
) -> None:
    console.print(terminal.heading(candidate.name))
    style = "green" if candidate.verdict.passed else "red"
    console.print(Text(verdict_text(candidate.verdict, report.tolerance), style=style))
    if keep := keep_text(candidate):
        console.print(Text(keep))
    for place, origin in enumerate(candidate.origins[:5], 1):
        line = Text.assemble(f"{place}. ", (origin.module, "bold"), f": {origin.kind.value}: ")
        console.print(Padding(line + Text(origin.text), (0, 0, 0, 2)))
    summaries = module_summaries(candidate.calls)
    if summaries:
        console.print(_modules(_shown(summaries, rows), console.width))
        if len(summaries) > rows:
            console.print(Text(f"and {len(summaries) - rows} more modules", style="dim"))
    terminal.print_notes(console, candidate.notes)


def _shown(summaries: Sequence[ModuleSummary], rows: int) -> list[ModuleSummary]:
    """Return the modules whose own operations lose most, in the order of execution."""
    ordered = sorted(summaries, key=lambda one: badness(one.own or one.worst.output), reverse=True)
    chosen = {one.module for one in ordered[:rows]}
    return [one for one in summaries if one.module in chosen]


def _modules(summaries: Sequence[ModuleSummary], width: int) -> TerminalTable:
    """Return the table of some modules; a narrow terminal shows the columns that matter most."""
    headings = ["module", "read", "own", "total", "error", "lost", "ULPs", "gradient", "class"]
    columns = len(headings) if width >= _WIDE else 6
    rows = [
        (
            named(one.module),
            scientific(one.worst.input_error),
            _relative(one.own),
            _relative(one.worst.output),
            Cell(one.role.value, _ROLE_TONES.get(one.role, "")),
            lost_text(one.worst.output),
            scientific(one.worst.output.ulps_mean),
            _relative(one.gradient),
            one.kind,
        )[:columns]
        for one in summaries
    ]
    table = terminal.table(Table(headings[:columns], rows, text=(0, 4, 5, 8)), single=True)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    table.columns[0].min_width = 16
    return table


def _relative(error: TensorError | None) -> str:
    return "–" if error is None else scientific(error.relative_l2)


def lost_text(error: TensorError) -> str:
    """Return the shares of elements that overflow and underflow."""
    if error.nonfinite_ratio > 0:
        return f"{percent(error.nonfinite_ratio)} NaN/Inf"
    return f"{percent(error.underflow_ratio)} to 0" if error.underflow_ratio > 0 else ""


CALLS_MAX = 4000
"""Calls that are plotted at most."""
ORIGINS_SHOWN = 5
_PARAMETERS_SHOWN = 12
_MEASURED = (
    "mean abs",
    "relative L2",
    "cosine",
    "NaN, Inf",
    "to zero",
    "loss, reference",
    "loss",
)
_MODULES = (
    "module",
    "class",
    "calls",
    "read",
    "own",
    "total",
    "ULPs, mean",
    "ULPs, most",
    "cosine",
    "lost",
    "gradient",
    "own gradient",
    "error",
)


_PARAMETERS = ("parameter", "relative L2", "cosine", "NaN, Inf", "to zero", "subnormal")
_ROLE_TONES = {ErrorRole.BEGINS: "bad", ErrorRole.AMPLIFIED: "warn"}
_LOST = (OriginKind.OVERFLOW, OriginKind.GRADIENT_OVERFLOW)


def as_html(report: PrecisionReport) -> str:
    """Return the comparison as one page that loads nothing."""
    plots = {one.name: plots_of(one) for one in report.candidates}
    return render(
        "precisions",
        tool="compare",
        title=report.model,
        verdict=_verdict(report),
        good=bool(report.passed),
        facts=(
            ("parameters", f"{report.parameters:,}"),
            ("reference", report.reference),
            (
                "passes below",
                f"mean absolute difference {percent(report.tolerance)} of the RMS of the model's "
                "outputs, and nothing NaN or Inf that is finite in the reference",
            ),
            ("loss scale", str(report.loss_scale)),
            *report.environment.items(),
        ),
        plots=[group for groups in plots.values() for group in groups],
        origin_tones={kind: "bad" if kind in _LOST else "warn" for kind in OriginKind},
        verdicts=Table(
            ("precision", "verdict", *_MEASURED),
            [(one.name, _result(one, tag=True), *_measured(one)) for one in report.candidates],
            title="verdicts",
            text=(0, 1),
        ),
        candidates=[_candidate(one, report, plots[one.name]) for one in report.candidates],
        notes=report.notes,
    )


def _verdict(report: PrecisionReport) -> str:
    passed, total = report.passed, len(report.candidates)
    if len(passed) == total:
        return "Every precision that was compared passes."
    if not passed:
        return "No precision that was compared passes."
    verb = "pass" if len(passed) > 1 else "passes"
    return f"{', '.join(passed)} {verb}; {total - len(passed)} of {total} fail."


def _candidate(
    candidate: CandidateComparison, report: PrecisionReport, plots: Sequence[Plots]
) -> dict[str, Any]:
    worst = sorted(candidate.parameters, key=lambda one: badness(one.gradient), reverse=True)
    return {
        "name": candidate.name,
        "meaning": candidate.meaning,
        "passed": candidate.verdict.passed,
        "verdict": verdict_text(candidate.verdict, report.tolerance),
        "keep": keep_text(candidate),
        "origins": candidate.origins[:ORIGINS_SHOWN],
        "plots": plots,
        "modules": Table(
            _MODULES,
            [_row(one) for one in module_summaries(candidate.calls)],
            title=f"modules in {candidate.name}",
            text=(0, 1, len(_MODULES) - 1),
        ),
        "parameters": Table(
            _PARAMETERS,
            [
                (
                    Cell(one.name, "name"),
                    scientific(one.gradient.relative_l2),
                    cosine_text(one.gradient.cosine),
                    percent(one.gradient.nonfinite_ratio),
                    percent(one.gradient.underflow_ratio),
                    percent(one.gradient.subnormal_ratio),
                )
                for one in worst[:_PARAMETERS_SHOWN]
            ],
            title=f"gradients in {candidate.name}",
        ),
        "notes": candidate.notes,
    }


def _row(one: ModuleSummary) -> tuple[str | Cell, ...]:
    output = one.worst.output
    return (
        Cell(named(one.module), "name"),
        one.kind,
        str(one.calls),
        scientific(one.worst.input_error),
        Cell(_relative(one.own), title=one.own_missing),
        _relative(output),
        scientific(output.ulps_mean),
        scientific(output.ulps_max),
        cosine_text(output.cosine),
        lost_text(output),
        _relative(one.gradient),
        _relative(one.gradient_own),
        Cell(one.role.value, _ROLE_TONES.get(one.role, "")),
    )


def plots_of(candidate: CandidateComparison) -> list[Plots]:
    """Return the plots of a candidate; none for one that failed before its first call."""
    calls = list(candidate.calls[:CALLS_MAX])
    if not calls:
        return []
    kept: list[Curve] = []
    if candidate.keep is not None and candidate.keep.calls:
        matched = _matched(calls, candidate.keep.calls)
        kept = [Curve("with modules kept in FP32", _errors(matched), "good")]
    forward = _pass(
        candidate,
        "forward",
        "relative L2 error of each call's output, in the order in which calls end",
        calls,
        [call.output for call in calls],
        [Curve("own operations", _errors([call.own for call in calls]), "warn", True), *kept],
    )
    backward = [call for call in reversed(calls) if call.gradient is not None]
    if not backward:
        return [forward]
    own = _errors([call.gradient_own for call in backward])
    return [
        forward,
        _pass(
            candidate,
            "backward",
            "relative L2 error of the gradient that reaches each call's output, last call first",
            backward,
            [call.gradient for call in backward],
            [Curve("own backward", own, "warn", True)],
        ),
    ]


def _pass(
    candidate: CandidateComparison,
    name: str,
    caption: str,
    calls: Sequence[CallComparison],
    errors: Sequence[TensorError | None],
    others: Sequence[Curve],
) -> Plots:
    """Return the plot of a pass; calls with NaN or Inf that the reference lacks are marked."""
    plot = Plot(
        id=f"{candidate.name}-{name}",
        title=f"{name.capitalize()} pass",
        caption=f"{caption}; × marks NaN or Inf",
        curves=[Curve("total", _errors(errors)), *others],
        log=10,
        limits=[(candidate.unit_roundoff, "rounding of one operation")],
        marks={
            index: "NaN or Inf"
            for index, error in enumerate(errors)
            if error is not None and error.nonfinite_ratio > 0
        },
    )
    names = [named(call.module) for call in calls]
    return Plots(label="call", places=range(1, len(calls) + 1), names=names, plots=[plot])


def _matched(
    calls: Sequence[CallComparison], others: Sequence[CallComparison]
) -> list[TensorError | None]:
    """Return the errors of other calls of the same modules, in the order of `calls`."""
    waiting: dict[str, list[CallComparison]] = {}
    for call in reversed(others):
        waiting.setdefault(call.module, []).append(call)
    return [
        waiting[call.module].pop().output if waiting.get(call.module) else None for call in calls
    ]


def _errors(errors: Sequence[TensorError | None]) -> Values:
    """Return relative errors; None where there is none, or zero, which a logarithm has not."""
    return finite(
        [
            None if error is None or error.nonfinite_ratio > 0 else error.relative_l2 or None
            for error in errors
        ]
    )
