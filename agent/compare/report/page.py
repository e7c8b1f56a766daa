"""A comparison as a page, with errors along the forward and the backward pass."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import TYPE_CHECKING, Any

from mp_agent.compare.report.model import (
    CallComparison,
    CandidateComparison,
    ModuleSummary,
    PrecisionReport,
    TensorError,
    module_summaries,
)
from mp_agent.compare.report.text import (
    cosine_text,
    keep_text,
    lost_text,
    named,
    percent,
    scientific,
    verdict_text,
)
from mp_agent.exporters.status_page.page import (
    content_security_policy,
    own_script,
    plot_helpers,
    plot_library,
    report_template,
)
from mp_agent.flight.report.page import style_sheet

if TYPE_CHECKING:
    from jinja2 import Template


CALLS_MAX = 4000
"""Calls that are plotted at most."""

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class ErrorCurve:
    """One line of a plot; None where there is no value, or zero, which a logarithm has not."""

    label: str
    color: str
    values: Values
    points: bool = False
    """Whether single points are drawn in place of a line."""


@dataclass(frozen=True, slots=True)
class ErrorPlot:
    """One plot over the calls of a pass."""

    id: str
    title: str
    caption: str
    names: Sequence[str]
    """Of the modules, along the axis."""
    curves: Sequence[ErrorCurve]
    limit: float
    """The unit roundoff, drawn as a line."""
    marks: Sequence[int]
    """Indices of calls with NaN or Inf that the reference does not have."""

    @property
    def description(self) -> str:
        """The plot as text, for readers who do not see it."""
        known = [value for value in self.curves[0].values if value is not None]
        ends = (
            f"largest {scientific(max(known))}, last {scientific(known[-1])}" if known else "none"
        )
        return f"{self.title}: relative error over {len(self.names)} calls: {ends}"


def plots_of(candidate: CandidateComparison) -> list[ErrorPlot]:
    """Return the plots of a candidate; none for one that failed before its first call."""
    calls = list(candidate.calls[:CALLS_MAX])
    if not calls:
        return []
    forward = _plot(
        candidate,
        "forward",
        "Forward pass",
        "relative L2 error of each call's output, in the order in which calls end",
        calls,
        [
            ErrorCurve("total", "series", [_value(call.output) for call in calls]),
            ErrorCurve("own operations", "warn", [_value(call.own) for call in calls], points=True),
        ],
        [index for index, call in enumerate(calls) if call.output.nonfinite_ratio > 0],
    )
    if candidate.keep is not None and candidate.keep.calls:
        after = _matched(calls, candidate.keep.calls)
        forward = _with(forward, ErrorCurve("with modules kept in FP32", "good", after))
    backward = [call for call in reversed(calls) if call.gradient is not None]
    if not backward:
        return [forward]
    return [
        forward,
        _plot(
            candidate,
            "backward",
            "Backward pass",
            "relative L2 error of the gradient that reaches each call's output, last call first",
            backward,
            [
                ErrorCurve("total", "series", [_value(call.gradient) for call in backward]),
                ErrorCurve(
                    "own backward",
                    "warn",
                    [_value(call.gradient_own) for call in backward],
                    points=True,
                ),
            ],
            [
                index
                for index, call in enumerate(backward)
                if call.gradient is not None and call.gradient.nonfinite_ratio > 0
            ],
        ),
    ]


def _plot(
    candidate: CandidateComparison,
    kind: str,
    title: str,
    caption: str,
    calls: Sequence[CallComparison],
    curves: Sequence[ErrorCurve],
    marks: Sequence[int],
) -> ErrorPlot:
    return ErrorPlot(
        id=f"{candidate.name}-{kind}",
        title=title,
        caption=caption,
        names=[named(call.module) for call in calls],
        curves=curves,
        limit=candidate.unit_roundoff,
        marks=marks,
    )


def _with(plot: ErrorPlot, curve: ErrorCurve) -> ErrorPlot:
    return ErrorPlot(
        plot.id,
        plot.title,
        plot.caption,
        plot.names,
        [*plot.curves, curve],
        plot.limit,
        plot.marks,
    )


def _matched(calls: Sequence[CallComparison], others: Sequence[CallComparison]) -> Values:
    """Return the errors of other calls of the same modules, in the order of `calls`."""
    waiting: dict[str, list[CallComparison]] = {}
    for call in reversed(others):
        waiting.setdefault(call.module, []).append(call)
    return [
        _value(waiting[call.module].pop().output) if waiting.get(call.module) else None
        for call in calls
    ]


def _value(error: TensorError | None) -> float | None:
    if error is None or error.nonfinite_ratio > 0:
        return None
    return error.relative_l2 if isfinite(error.relative_l2) and error.relative_l2 > 0 else None


HEADINGS = (
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


def as_html(report: PrecisionReport) -> str:
    """Return the page. It loads nothing; its policy lets only its own scripts run."""
    library, library_style = plot_library()
    scripts = (library, own_script(*plot_helpers(), _asset("plots.js")))
    styles = (library_style, style_sheet(), _asset("page.css"))
    plots = [plot for one in report.candidates for plot in plots_of(one)]
    return _template().render(
        policy=content_security_policy(scripts, styles),
        scripts=scripts,
        styles=styles,
        report=report,
        verdict=_verdict(report),
        candidates=[_candidate(one, report) for one in report.candidates],
        plot_data=[asdict(plot) for plot in plots],
        headings=HEADINGS,
    )


def _verdict(report: PrecisionReport) -> tuple[bool, str]:
    passed, total = report.passed, len(report.candidates)
    if len(passed) == total:
        return True, "Every precision that was compared passes."
    if not passed:
        return False, "No precision that was compared passes."
    return (
        True,
        f"{', '.join(passed)} {'pass' if len(passed) > 1 else 'passes'}; "
        f"{total - len(passed)} of {total} fail.",
    )


def _candidate(candidate: CandidateComparison, report: PrecisionReport) -> dict[str, Any]:
    output = candidate.output
    summaries = module_summaries(candidate.calls)
    return {
        "name": candidate.name,
        "meaning": candidate.meaning,
        "passed": candidate.verdict.passed,
        "verdict": verdict_text(candidate.verdict, report.tolerance),
        "cells": (
            scientific(candidate.verdict.mean_abs) if output else "–",
            scientific(output.relative_l2) if output else "–",
            cosine_text(output.cosine) if output else "–",
            percent(output.nonfinite_ratio) if output else "–",
            percent(output.underflow_ratio) if output else "–",
            _loss(candidate.reference_loss),
            _loss(candidate.candidate_loss),
        ),
        "keep": keep_text(candidate),
        "origins": candidate.origins,
        "plots": plots_of(candidate),
        "rows": [_row(one) for one in summaries],
        "parameters": _parameters(candidate),
        "notes": candidate.notes,
    }


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def _row(one: ModuleSummary) -> dict[str, Any]:
    output = one.worst.output
    cells = (
        named(one.module),
        one.kind,
        str(one.calls),
        scientific(one.worst.input_error),
        _relative(one.own),
        _relative(output),
        scientific(output.ulps_mean),
        scientific(output.ulps_max),
        cosine_text(output.cosine),
        lost_text(output),
        _relative(one.gradient),
        _relative(one.gradient_own),
        one.role.value,
    )
    return {"cells": cells, "role": one.role.name.lower(), "note": one.own_missing}


def _relative(error: TensorError | None) -> str:
    return "–" if error is None else scientific(error.relative_l2)


def _parameters(candidate: CandidateComparison) -> Sequence[tuple[str, ...]]:
    """Return the parameters whose gradients err most."""
    worst = sorted(
        candidate.parameters,
        key=lambda one: (one.gradient.nonfinite_ratio, one.gradient.relative_l2),
        reverse=True,
    )
    return [
        (
            one.name,
            scientific(one.gradient.relative_l2),
            cosine_text(one.gradient.cosine),
            percent(one.gradient.nonfinite_ratio),
            percent(one.gradient.underflow_ratio),
            percent(one.gradient.subnormal_ratio),
        )
        for one in worst[:12]
    ]


@cache
def _template() -> "Template":
    return report_template(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return (files("mp_agent.compare.report") / "assets" / name).read_text("utf-8")
