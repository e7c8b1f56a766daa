"""A backtest as a page: curves over the steps, and spans of alerts."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mp_agent.backtest.report.terminal import (
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


_TITLES = {
    "loss": ("Loss", "× marks NaN or Inf"),
    "grad_norm": ("Gradient norm", "logarithmic; × marks NaN or Inf"),
    "loss_scale": ("Loss scale", "logarithmic; × marks skipped steps"),
    "learning_rate": ("Learning rate", ""),
}
_BASES = {"grad_norm": 10, "loss_scale": 2}
_MARKS = {"loss": "loss", "grad_norm": "grad_norm", "loss_scale": "skipped"}
_WIDE = 1000.0
"""Largest over smallest loss from which on its axis is logarithmic."""


def plots_of(run: RunResult) -> dict[str, Any]:
    """Return the plots of a run; every number is finite.

    Places, not steps, are the axis: a resumed run has some steps twice.
    """
    curves = run.curves
    if curves is None:
        return {"step": [], "curves": [], "spans": []}
    shown = []
    for name, (title, caption) in _TITLES.items():
        values = curves.values.get(name)
        known = [] if values is None else [value for value in values if value is not None]
        if values is None or (name == "learning_rate" and len(set(known)) < 2):
            continue
        base = _BASES.get(name)
        if name == "loss" and known and min(known) > 0 and max(known) >= _WIDE * min(known):
            base = 10
        shown.append(
            {
                "id": name,
                "title": title,
                "caption": caption,
                "log": base,
                "values": [
                    value if value is not None and (base is None or value > 0) else None
                    for value in values
                ],
                "marks": list(curves.marks.get(_MARKS.get(name, ""), ())),
                "description": _description(title, known),
            }
        )
    return {
        "step": list(curves.step),
        "curves": shown,
        "spans": [
            {
                "name": alert.name,
                "severity": alert.severity,
                "places": [_places(curves.step, span) for span in alert.spans],
            }
            for alert in run.alerts
        ],
        "resumed": [place for place, (a, b) in enumerate(pairwise(curves.step), 1) if b < a],
    }


def _places(steps: Sequence[int], span: tuple[int, int]) -> tuple[int, int]:
    """Return the places of a span's first and last step."""
    first = next((place for place, step in enumerate(steps) if step >= span[0]), len(steps) - 1)
    last = next(
        (place for place in range(len(steps) - 1, -1, -1) if steps[place] <= span[1]), first
    )
    return first, max(first, last)


def _description(title: str, known: Sequence[float]) -> str:
    if not known:
        return f"{title} per step: no value"
    return (
        f"{title} per step: smallest {min(known):.4g}, largest {max(known):.4g}, "
        f"last {known[-1]:.4g}"
    )


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
    return (files("mp_agent.backtest.report") / "assets" / name).read_text("utf-8")
