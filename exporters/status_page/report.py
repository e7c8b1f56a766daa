"""The status of a run as data, and the page that shows it: one HTML file with everything in it.

The data are the numbers of now, and the last steps for curves: a report on a run for the page and
`mp-agent top`, as plain JSON values.
The format is documented in docs/api.md; `FORMAT` grows when a field changes its meaning.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import sqrt
from typing import Any, Protocol

from mp_agent.catalog.metrics.run import RUNBOOKS, postmortem_path
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import EndReason
from mp_agent.records.views import AgentView, LayerView, RankView, RunView
from mp_agent.report.page import (
    SHARED_SCRIPTS,
    asset,
    content_security_policy,
    own_script,
    plot_library,
)

STEPS_KEPT = 1000

_NAMES = (
    *("step", "time_unix_seconds", "loss", "loss_scale", "grad_norm", "skipped"),
    *("loss_nonfinite", "gradients_nonfinite"),
)
Point = tuple[int, float, float | None, float | None, float | None, bool, bool, bool]


class StepHistory:
    """Keeps loss, loss scale and gradient norm of the last `STEPS_KEPT` closed steps."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=STEPS_KEPT)
        self.loss_misread = False
        """Whether the losses are known to be multiplied by a scale; they are omitted then."""

    def add(self, step: MergedStep) -> None:
        """Add a closed step. A norm that does not count (skipped, partial) is omitted.

        So is a loss that was NaN or Inf on a rank.
        """
        loss_nonfinite = step.flag("loss_nonfinite")
        self._points.append(
            (
                step.step,
                step.time_unix_seconds,
                None if loss_nonfinite else step.get("loss"),
                step.get("loss_scale"),
                step.grad_norm if step.gradients_judged else None,
                step.skipped,
                loss_nonfinite,
                step.gradient_nonfinite_elements > 0,
            )
        )

    def clear(self) -> None:
        """Remove all steps: a new attempt starts its own count."""
        self._points.clear()

    def columns(self, *, after_step: int | None = None) -> Mapping[str, list[object]]:
        """Return the steps as columns of equal length, oldest first; None for "not observed"."""
        points = [p for p in self._points if after_step is None or p[0] > after_step]
        columns: dict[str, list[object]] = {
            name: [point[at] for point in points] for at, name in enumerate(_NAMES)
        }
        if self.loss_misread:
            columns["loss"] = [None] * len(points)
        return columns


FORMAT = 1
LAYERS_AT_MOST = 1000
"""Layers in a report: those with non-finite elements first, then those of the largest norm."""
_DOING = {"eval": "Evaluating", "checkpoint": "Saving a checkpoint"}
"""What a run is doing, by phase, other than training."""
_SEVERITIES = ("critical", "warning", "info")


class RunSources(Protocol):
    """All views of one run. `view` is None on nodes that do not hold rank 0."""

    @property
    def run(self) -> str: ...  # noqa: D102
    @property
    def node_rank(self) -> int | None: ...  # noqa: D102
    @property
    def view(self) -> RunView | None: ...  # noqa: D102
    @property
    def layers(self) -> Sequence[LayerView]: ...  # noqa: D102
    @property
    def ranks(self) -> Sequence[RankView]: ...  # noqa: D102
    @property
    def agent(self) -> AgentView: ...  # noqa: D102


def snapshot_report(
    sources: Sequence[RunSources], thresholds: Mapping[str, float], time_unix_seconds: float
) -> dict[str, Any]:
    """Return the response of `/api/v1/snapshot`."""
    return {
        "format": FORMAT,
        "time_unix_seconds": time_unix_seconds,
        "thresholds": dict(thresholds),
        "runs": [_run(source) for source in sources],
    }


def _run(source: RunSources) -> dict[str, Any]:
    view = source.view
    layers = [layer for layer in source.layers if layer.family == GRADIENTS.name]
    return {
        "run": source.run,
        "node_rank": source.node_rank,
        "is_root": view is not None,
        "verdict": verdict(source),
        "summary": None if view is None else _summary(view),
        "pages": {"postmortem": postmortem_path(source.run), "runbooks": RUNBOOKS},
        "conditions": [] if view is None else [_condition(c) for c in _by_severity(view)],
        "layers": _layers(layers, _first_layer(view)),
        "layers_omitted": max(len(layers) - LAYERS_AT_MOST, 0),
        "ranks": _ranks(source.ranks),
        "agent": _agent(source.agent),
    }


def verdict(source: RunSources) -> str:
    """Return the state of the run in one sentence."""
    view = source.view
    if view is None:
        return f"Node {source.node_rank} of the run; its root agent reports on the run as a whole."
    last = view.latest.step
    at = f" at step {last.step}" if last else " before its first step"
    if view.end_reason is EndReason.COMPLETED:
        state = f"Ended: completed{at}"
    elif not view.active:
        state = f"Ended: {view.end_reason.name.lower()}{at}"
    elif last is None:
        state = "Starting: no step yet"
    else:
        state = f"{_DOING.get(view.phase_name, 'Training')}: step {last.step}"
    if view.conditions:
        return f"{state}; {_in_force(_by_severity(view))}."
    if last and last.coverage < 1.0:
        return f"{state}; the numbers cover {last.coverage:.0%} of the ranks."
    return f"{state}; no condition in force." if view.active else f"{state}."


def _in_force(conditions: Sequence[ActiveCondition]) -> str:
    """Return the worst condition as part of a sentence, and the number of others."""
    worst, more = conditions[0], len(conditions) - 1
    # The first line of a critical condition goes on, with what to do.
    first, _, _ = worst.summary.partition(". ")
    others = f", and {more} more condition{'s' if more > 1 else ''}" if more else ""
    return f"{worst.severity}: {_within_sentence(first)} ({worst.name}){others}"


def _within_sentence(sentence: str) -> str:
    """Return a sentence to continue another: no full stop, no capital except a name's."""
    first, _, _ = sentence.partition(" ")
    start = first.lower() if first.istitle() or len(first) == 1 else first
    return start + sentence.removeprefix(first).rstrip(".")


def _by_severity(view: RunView) -> list[ActiveCondition]:
    order = {severity: place for place, severity in enumerate(_SEVERITIES)}
    return sorted(view.conditions, key=lambda c: (order.get(c.severity, len(order)), c.name))


def _summary(view: RunView) -> dict[str, Any]:
    latest, first = view.latest, view.first_nonfinite
    last, judged = latest.step, latest.judged
    norm_step = judged.step if judged else None
    return {
        "attempt": view.identity.attempt,
        "world_size": view.identity.world_size,
        "nodes": view.nodes,
        "torch_version": view.identity.torch_version,
        "facts": dict(view.facts),
        "active": view.active,
        "end_reason": None if view.active else view.end_reason.name.lower(),
        "phase": view.phase_name,
        "step": last.step if last else None,
        "last_step_time_unix_seconds": last.time_unix_seconds if last else None,
        "loss": latest.loss,
        "loss_step": latest.value_steps.get("loss"),
        "loss_nonfinite_since_step": latest.nonfinite_since.get("loss"),
        "loss_median": view.loss.median,
        "loss_spike_bound": view.loss.spike_bound,
        "learning_rate": latest.learning_rate,
        "learning_rate_step": latest.value_steps.get("learning_rate"),
        "loss_scale": view.loss_scale.last,
        "loss_scale_step": latest.value_steps.get("loss_scale"),
        "loss_scale_initial": view.loss_scale.initial,
        "grad_norm": judged.grad_norm if judged else None,
        "grad_norm_step": norm_step,
        "grad_abs_max": judged.get("abs_max") if judged else None,
        "grad_abs_max_step": norm_step,
        "clip_coefficient": judged.clip_coefficient if judged else None,
        "clip_coefficient_step": norm_step,
        "gradients_nonfinite_since_step": latest.nonfinite_since.get("gradients"),
        "layer_interval_steps": last.get("layer_interval_steps") if last else None,
        "layer_interval_shortest_steps": latest.layer_interval_shortest_steps,
        "measuring_interval_steps": last.get("measuring_interval_steps") if last else None,
        "coverage": last.coverage if last else 1.0,
        "missing_ranks": list(last.missing_ranks) if last else [],
        "trackers": [
            {"tracker": at.tracker, "name": at.name, "url": at.url} for at in view.trackers
        ],
        "first_nonfinite": None
        if first is None
        else {
            "step": first.step,
            "rank": first.rank,
            "layer": first.layer,
            "phase": first.phase,
        },
    }


def _condition(condition: ActiveCondition) -> dict[str, Any]:
    names = (
        *("name", "severity", "since_step", "since_unix_seconds", "value"),
        *("rank", "layer", "phase", "summary", "description", "remedy", "postmortem"),
    )
    return {name: getattr(condition, name) for name in names}


def _first_layer(view: RunView | None) -> str:
    """Return the layer with the first NaN or Inf of an incident that goes on; "" if not known."""
    first = view.first_nonfinite if view and view.latest.nonfinite_since else None
    return first.layer if first else ""


def _layers(layers: Sequence[LayerView], first: str) -> list[dict[str, Any]]:
    """Return the layers in module order; only the worst if there are too many.

    first: the layer with the first NaN or Inf, which comes first here too.
    """
    rows = [_layer(layer, first) for layer in layers]
    badness = sorted(
        range(len(rows)),
        key=lambda at: (
            rows[at]["first_nonfinite"],
            rows[at]["nonfinite_elements"],
            rows[at]["grad_norm"] or 0.0,
        ),
        reverse=True,
    )
    kept = [rows[at] for at in sorted(badness[:LAYERS_AT_MOST])]
    return sorted(kept, key=lambda row: not row["first_nonfinite"])


def _layer(layer: LayerView, first: str) -> dict[str, Any]:
    values = layer.values
    elements = values.get("elements", 0.0)
    return {
        "layer": layer.name,
        "step": layer.latest.step,
        "first_nonfinite": layer.name == first,
        "grad_norm": sqrt(values["sum_squares"]) if layer.judged else None,
        "grad_norm_step": layer.step if layer.judged else None,
        "grad_abs_max": values.get("abs_max") if layer.judged else None,
        "zero_ratio": values["zero_elements"] / elements if layer.judged and elements else None,
        "nonfinite_elements": layer.nonfinite_elements,
        "elements": elements,
    }


def _ranks(ranks: Sequence[RankView]) -> list[dict[str, Any]]:
    foremost = max((rank.step for rank in ranks if rank.step is not None), default=0)
    return [
        {
            "rank": rank.identity.rank,
            "host": rank.identity.host,
            "local_rank": rank.identity.local_rank,
            "device": rank.facts.get("device", ""),
            "up": rank.up,
            "phase": rank.state.phase_name,
            "step": rank.step,
            "lag": None if rank.step is None else foremost - rank.step,
            "loss": (rank.values or {}).get("loss"),
            "compute_seconds": (rank.values or {}).get("compute_seconds"),
            "overhead_ratio": _overhead(rank.values or {}),
        }
        for rank in ranks
    ]


def _overhead(values: Mapping[str, float]) -> float | None:
    """Return the share of the step time that the probe takes, where it takes most."""
    shares = (values.get(f"{place}_overhead_ratio") for place in ("host", "device"))
    return max((share for share in shares if share is not None), default=None)


def _agent(agent: AgentView) -> dict[str, Any]:
    return {
        "version": agent.version,
        "probe_seconds": agent.probe_seconds,
        "probe_errors": agent.probe_errors,
        "setting_errors": agent.setting_errors,
        "records_dropped": agent.records_dropped,
        "series_dropped": agent.series_dropped,
        "scrape_duration_seconds": agent.scrape_duration_seconds,
        "unsupported": list(agent.unsupported),
        "flight_records": agent.flight_records,
        "flight_errors": agent.flight_errors,
        "push_failures": agent.transport.push_failures,
        "reports_dropped": agent.transport.reports_dropped,
        "last_push_time_unix_seconds": agent.transport.last_push_unix_seconds,
        "nodes_known": agent.transport.nodes_known,
    }


_PARTS = ("charts.js", "tables.js", "page.js")
"""The page's own script after what it shares, in the order of its parts' dependencies."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page's bytes, and the headers to send with it."""

    body: bytes
    headers: dict[str, str]


@cache
def status_page() -> Page:
    """Return the page. It loads nothing but `/api/v1/…` of the agent that serves it."""
    library, library_style = plot_library()
    scripts = (library, own_script(*map(asset, SHARED_SCRIPTS), *map(_asset, _PARTS)))
    styles = (library_style, _asset("page.css"))
    html = _asset("page.html")
    html = html.replace("<!--styles-->", "".join(f"<style>{text}</style>" for text in styles))
    html = html.replace("<!--scripts-->", "".join(f"<script>{text}</script>" for text in scripts))
    policy = content_security_policy(scripts, styles)
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": f"{policy}; connect-src 'self'; frame-ancestors 'self'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html.encode(), headers)


def _asset(name: str) -> str:
    return (files("mp_agent.exporters.status_page") / "assets" / name).read_text("utf-8")
