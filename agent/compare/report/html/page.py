"""The page of a report: one HTML file with its scripts and data in it."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mp_agent.compare.report.html.plots import plots_of
from mp_agent.compare.report.model import CandidateComparison, PrecisionReport
from mp_agent.compare.report.modules import ModuleSummary, module_summaries
from mp_agent.compare.report.tensor_error import TensorError
from mp_agent.compare.report.terminal import lost_text
from mp_agent.compare.report.text import (
    cosine_text,
    keep_text,
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
from mp_agent.flight.report.html.page import style_sheet

if TYPE_CHECKING:
    from jinja2 import Template

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
    return (files("mp_agent.compare.report.html") / "assets" / name).read_text("utf-8")
