"""The page of a backtest: one HTML file with its scripts and data in it."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from mp_agent.backtest.report.html.plots import plots_of
from mp_agent.backtest.report.text import (
    ALERT_HEADINGS,
    SUMMARY_HEADINGS,
    alert_cells,
    blind_lines,
    run_line,
    summary_rows,
    verdict,
)
from mp_agent.backtest.results import Failure, RunResult
from mp_agent.exporters.status_page.page import (
    content_security_policy,
    own_script,
    plot_helpers,
    plot_library,
    report_template,
)

if TYPE_CHECKING:
    from jinja2 import Template

_OPEN_AT_MOST = 8
"""Runs with alerts whose curves are shown without a click."""


def as_html(
    runs: Sequence[RunResult], failures: Sequence[Failure], *, settings: Sequence[str] = ()
) -> str:
    """Return the page. It loads nothing; its policy lets only its own scripts run."""
    library, library_style = plot_library()
    scripts = (library, own_script(*plot_helpers(), _asset("plots.js")))
    styles = (library_style, _asset("page.css"))
    alerting = [run for run in runs if run.alerts]
    opened = {run.name for run in alerting[:_OPEN_AT_MOST]}
    if len(runs) == 1:
        opened = {runs[0].name}
    return _template().render(
        policy=content_security_policy(scripts, styles),
        scripts=scripts,
        styles=styles,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        verdict="; ".join(verdict(runs)),
        bad=any(run.worst == "critical" for run in runs),
        settings=settings,
        summary={"headings": SUMMARY_HEADINGS, "rows": summary_rows(runs)},
        alerts={
            "headings": ALERT_HEADINGS,
            "rows": [alert_cells(run, alert) for run in alerting for alert in run.alerts],
            "kinds": [alert.severity for run in alerting for alert in run.alerts],
        },
        runs=[
            {
                "result": run,
                "line": run_line(run),
                "blind": blind_lines(run.blind),
                "open": run.name in opened,
            }
            for run in (*alerting, *(run for run in runs if not run.alerts))
        ],
        failures=failures,
        plot_data=[plots_of(run) for run in (*alerting, *(run for run in runs if not run.alerts))],
    )


@cache
def _template() -> "Template":
    return report_template(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return (files("mp_agent.backtest.report.html") / "assets" / name).read_text("utf-8")
