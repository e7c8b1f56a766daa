"""The page of a comparison of two runs."""

from functools import cache
from importlib.resources import files
from math import isfinite
from typing import TYPE_CHECKING, Any

from mp_agent.compare.runs.divergence import QUANTITIES, RunComparison, RunSeries
from mp_agent.compare.runs.terminal import (
    departure_text,
    shown_steps,
    step_headings,
    step_row,
    verdict,
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


_ROWS = 16
_LAYERS = 20
_DRAWN = ("loss", "grad_norm")


def runs_as_html(comparison: RunComparison) -> str:
    """Return the page. It loads nothing; its policy lets only its own scripts run."""
    library, library_style = plot_library()
    scripts = (library, own_script(*plot_helpers(), plots_script()))
    styles = (library_style, style_sheet(), _asset("page.css"))
    shown = shown_steps(comparison, _ROWS)
    apart = comparison.departure.step if comparison.departure else None
    return _template().render(
        policy=content_security_policy(scripts, styles),
        scripts=scripts,
        styles=styles,
        comparison=comparison,
        verdict=verdict(comparison),
        departures=[(one.step, departure_text(one)) for one in comparison.departures],
        layers=[(one.step, departure_text(one)) for one in comparison.layers[:_LAYERS]],
        layers_omitted=max(0, len(comparison.layers) - _LAYERS),
        headings=step_headings(comparison),
        rows=[(comparison.steps[i] == apart, step_row(comparison, i)) for i in shown],
        plot_data=(data := _plot_data(comparison)),
        plots=data["plots"],
    )


def _plot_data(comparison: RunComparison) -> dict[str, Any]:
    """Return what the script of the page reads; every number is finite."""
    plots: list[dict[str, Any]] = [
        {
            "id": name.replace("_", "-"),
            "title": QUANTITIES[name].capitalize(),
            "caption": "of both runs at equal steps",
            "log": False,
            "limit": None,
            "curves": [
                {"label": "first", "color": "series", "values": _values(comparison, run, name)},
                {"label": "second", "color": "bad", "values": _values(comparison, run_b, name)},
            ],
        }
        for run, run_b in ((comparison.first, comparison.second),)
        for name in _DRAWN
        if name in comparison.differences
    ]
    plots += [
        {
            "id": f"{name.replace('_', '-')}-difference",
            "title": f"Difference of the {QUANTITIES[name]}",
            "caption": "relative, logarithmic; the dashed line is the limit",
            "log": True,
            "limit": comparison.limits[name],
            "curves": [
                {
                    "label": "difference",
                    "color": "series",
                    "values": [value or None for value in comparison.differences[name]],
                }
            ],
        }
        for name in _DRAWN
        if name in comparison.differences
    ]
    departure = comparison.departure
    return {
        "step": list(comparison.steps),
        "departure": departure.step if departure else None,
        "plots": plots,
    }


def _values(comparison: RunComparison, run: RunSeries, name: str) -> list[float | None]:
    found = (run.steps[step].values.get(name) for step in comparison.steps)
    return [value if value is not None and isfinite(value) else None for value in found]


def plots_script() -> str:
    """Return the script that draws `plot-data`: the curves of two trainings over steps."""
    return _asset("plots.js")


@cache
def _template() -> "Template":
    return report_template(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return (files("mp_agent.compare.runs") / "assets" / name).read_text("utf-8")
