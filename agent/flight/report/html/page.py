"""The page of an analysis: one HTML file with its scripts and data in it."""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mp_agent.exporters.status_page.page import (
    content_security_policy,
    own_script,
    plot_helpers,
    plot_library,
    report_template,
)
from mp_agent.flight.postmortem.analysis import Analysis
from mp_agent.flight.postmortem.diagnosis import NOT_MEASURED
from mp_agent.flight.report.html.layers import layer_bars
from mp_agent.flight.report.html.plots import LANE_KINDS, LANES_MAX, plots_of
from mp_agent.flight.report.text import NAMES, STEP_HEADINGS, facts, number, step_cells, verdict
from mp_agent.records.steps import EndReason

if TYPE_CHECKING:
    from jinja2 import Template

Table = dict[str, Any]
"""Headings, rows, indices of the rows that stand out, and classes."""


def as_html(analysis: Analysis) -> str:
    """Return the page. It loads nothing; its policy lets only its own scripts run."""
    library, library_style = plot_library()
    scripts = (library, own_script(*plot_helpers(), _asset("plots.js")))
    styles = (library_style, _asset("page.css"))
    plots = plots_of(analysis)
    return _template().render(
        policy=content_security_policy(scripts, styles),
        scripts=scripts,
        styles=styles,
        analysis=analysis,
        verdict=verdict(analysis),
        facts=facts(analysis),
        plots=plots,
        plot_data=None if plots is None else plots.as_json(),
        lane_kinds=LANE_KINDS,
        layers=layer_bars(analysis.layers),
        changes=_changes(analysis),
        steps=_steps(analysis),
        ranks=_ranks(analysis),
        not_measured=", ".join(text for _, text in NOT_MEASURED),
    )


def style_sheet() -> str:
    """Return the style of this page, for other pages that look like it."""
    return _asset("page.css")


@cache
def _template() -> "Template":
    return report_template(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return (files("mp_agent.flight.report.html") / "assets" / name).read_text("utf-8")


def _changes(analysis: Analysis) -> Table:
    return {
        "headings": ("quantity", "6–50 steps before", "1–5 steps before", "at the step"),
        "rows": [
            (NAMES[m.name], number(m.long_before), number(m.just_before), number(m.at))
            for m in analysis.moves
        ],
        "marked": {index for index, move in enumerate(analysis.moves) if move.moved},
        "classes": "numeric",
    }


def _steps(analysis: Analysis) -> Table:
    bad = analysis.first_bad.sequence if analysis.first_bad else None
    return {
        "headings": STEP_HEADINGS,
        "rows": [step_cells(step) for step in analysis.around],
        "marked": {i for i, step in enumerate(analysis.around) if step.sequence == bad},
        "classes": "numeric remarks",
    }


def _ranks(analysis: Analysis) -> Table:
    logs = analysis.evidence.ranks
    remarkable = [log for log in logs if log.end is not EndReason.COMPLETED]
    return {
        "headings": ("rank", "host", "end", "phase", "step"),
        "rows": [
            (
                str(log.identity.rank),
                log.identity.host,
                log.end.name.lower(),
                log.state.phase_name,
                str(log.state.started_sequence),
            )
            for log in (remarkable or list(logs))[:LANES_MAX]
        ],
        "marked": set(),
        "classes": "",
    }
