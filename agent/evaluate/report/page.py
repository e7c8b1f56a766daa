"""The page of an evaluation: one HTML file with its scripts and data in it."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import TYPE_CHECKING, Any

from mp_agent.advice.report.model import environment_facts
from mp_agent.compare.runs.page import plots_script
from mp_agent.evaluate.report.model import (
    LOSS_DIFFERENCE_RATIO,
    Outcome,
    PlanEvaluation,
    relative_differences,
)
from mp_agent.evaluate.report.terminal import measured_rows, plan_text, verdict
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


_CLASSES = {Outcome.MET: "good", Outcome.MISSED: "bad", Outcome.NOT_MEASURED: "none"}


def as_html(evaluation: PlanEvaluation) -> str:
    """Return the page. It loads nothing; its policy lets only its own scripts run."""
    library, library_style = plot_library()
    scripts = (library, own_script(*plot_helpers(), plots_script()))
    styles = (library_style, style_sheet(), _asset("page.css"))
    plots = _plots(evaluation)
    steps = list(range(1, evaluation.steps + 1))
    return _template().render(
        policy=content_security_policy(scripts, styles),
        scripts=scripts,
        styles=styles,
        evaluation=evaluation,
        verdict=verdict(evaluation),
        plan=plan_text(evaluation.plan),
        targets=[(one, one.outcome.value, _CLASSES[one.outcome]) for one in evaluation.targets],
        rows=measured_rows(evaluation),
        facts=list(environment_facts(evaluation.environment)),
        plots=plots,
        plot_data={"step": steps, "departure": None, "plots": plots},
    )


def _plots(evaluation: PlanEvaluation) -> list[dict[str, Any]]:
    """Return what the script of the page reads; every number is finite."""
    exact, planned, perturbed = evaluation.fp32, evaluation.planned, evaluation.perturbed
    name = evaluation.plan.precision
    plots = [
        _plot(
            "loss",
            "Loss",
            "from the same weights, batches and random numbers",
            [
                _curve("FP32", "series", _finite(exact.losses)),
                _curve(name, "bad", _finite(planned.losses)),
            ],
        ),
        _plot(
            "difference",
            "Difference of the loss",
            "from FP32, relative, logarithmic; the dashed line is the target",
            [
                _curve(name, "bad", relative_differences(planned.losses, exact.losses)),
                _curve(
                    "FP32 from weights one last bit apart",
                    "series",
                    relative_differences(perturbed.losses, exact.losses),
                ),
            ],
            limit=LOSS_DIFFERENCE_RATIO,
        ),
        _plot(
            "time",
            "Time of a step",
            f"milliseconds; the first {evaluation.warmup_steps} do not count",
            [
                _curve("FP32", "series", [1000 * one for one in exact.seconds]),
                _curve(name, "bad", [1000 * one for one in planned.seconds]),
            ],
        ),
    ]
    if planned.loss_scales:
        scales = _curve("loss scale", "bad", _finite(planned.loss_scales[1:]))
        scale = _plot("scale", "Loss scale", "after each step, logarithmic", [scales])
        plots.append({**scale, "log": True})
    return plots


def _plot(
    name: str,
    title: str,
    caption: str,
    curves: list[dict[str, Any]],
    limit: float | None = None,
) -> dict[str, Any]:
    return {
        "id": name,
        "title": title,
        "caption": caption,
        "log": limit is not None,
        "limit": limit,
        "curves": curves,
    }


def _curve(label: str, color: str, values: Sequence[float | None]) -> dict[str, Any]:
    return {"label": label, "color": color, "values": list(values)}


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values]


@cache
def _template() -> "Template":
    return report_template(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return (files("mp_agent.evaluate.report") / "assets" / name).read_text("utf-8")
