"""Panels for metrics that no board places by hand: made from their catalog record alone."""

import re
from collections.abc import Iterable
from dataclasses import replace

from grafana.panel import Board, Panel, Query, Row, View, unit_of
from grafana.queries import SELECTED, aggregated, worst_of
from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics import METRICS

BOARD_OF_SCOPE = {
    Scope.RUN: "mp-agent-more",
    Scope.LAYER: "mp-agent-layers",
    Scope.RANK: "mp-agent-ranks",
    Scope.AGENT: "mp-agent-self",
}
MORE = Board(
    uid="mp-agent-more",
    title="mp_agent / More",
    description="Every number of one run that no other dashboard shows.",
    one_run=True,
    rows=(),
)
"""Apart from the run's own board: both in one would be more than a ConfigMap may have."""
_FIRST_ID = 500
_MOST_SERIES = 10


def with_unplaced_metrics(
    boards: tuple[Board, ...], metrics: Iterable[Metric] = METRICS
) -> tuple[Board, ...]:
    """Return the boards, each with a last row of the metrics of its scope that no panel shows."""
    shown = _names(
        query.expression for board in boards for panel in board.panels for query in panel.queries
    )
    missing = [metric for metric in metrics if metric.prometheus_name not in shown]
    return tuple(_extended(board, missing) for board in boards)


def _names(expressions: Iterable[str]) -> set[str]:
    """Return all words of some expressions, a histogram's parts by its own name."""
    words = {word for expression in expressions for word in re.findall(r"\w+", expression)}
    return words | {word.removesuffix("_bucket") for word in words}


def _extended(board: Board, missing: list[Metric]) -> Board:
    own = [metric for metric in missing if BOARD_OF_SCOPE[metric.scope] == board.uid]
    if not own:
        return board
    panels = tuple(_panel(_FIRST_ID + number, metric) for number, metric in enumerate(own))
    more = Row(title="More", panels=panels, collapsed=bool(board.rows))
    return replace(board, rows=(*board.rows, more))


def _panel(number: int, metric: Metric) -> Panel:
    return Panel(
        id=number,
        title=metric.name.removeprefix("mp_agent.")
        .replace(".", " ")
        .replace("_", " ")
        .capitalize(),
        description=metric.help,
        queries=(Query(_expression(metric), _legend(metric), optional=True),),
        nothing="This run has none",
        view=View.TIMESERIES,
        unit=unit_of(metric),
        runbooks=tuple(condition for condition in CONDITIONS if _looks_at(condition, metric)),
    )


def _looks_at(condition: Condition, metric: Metric) -> bool:
    return any(metric in level.metrics for level in condition.levels)


def _expression(metric: Metric) -> str:
    """Return at most ten series per run, whatever the metric's scope."""
    name = metric.prometheus_name
    labels = (*metric.scope.value[1:], *metric.labels)
    if metric.kind is Kind.HISTOGRAM:
        buckets = aggregated(
            f"rate({name}_bucket{{{SELECTED}}}[$__rate_interval])", "sum", keep=("le",)
        )
        return f"histogram_quantile(0.9, {buckets})"
    if metric.kind is Kind.COUNTER:
        present = aggregated(f"rate({name}{{{SELECTED}}}[$__rate_interval])", "sum", keep=labels)
    elif metric.name.endswith("timestamp"):
        # Grafana counts time in milliseconds.
        present = aggregated(f"{name}{{{SELECTED}}} * 1000", "max", keep=labels)
    elif labels:
        return worst_of(f"{name}{{{SELECTED}}}", _MOST_SERIES, keep=labels)
    else:
        present = aggregated(f"{name}{{{SELECTED}}}", "max")
    return f"topk({_MOST_SERIES}, {present})" if labels else present


def _legend(metric: Metric) -> str:
    labels = (*metric.scope.value[1:], *metric.labels)
    return " ".join(("{{run}}", *(f"{{{{{label}}}}}" for label in labels)))
