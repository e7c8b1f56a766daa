"""Agent scope: how pushes fare. What scrapes, Prometheus itself accounts for."""

from mp_agent.catalog.metric import Kind, Metric, Scope

EXPORT_METRICS = (
    Metric(
        name="mp_agent.export.failures",
        unit="{push}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        labels=("exporter",),
        help="Pushes that failed, fully or partially, by exporter. No increment is lost: "
        "counters are cumulative.",
        read=lambda agent: {(e.exporter,): float(e.failures) for e in agent.exports},
    ),
    Metric(
        name="mp_agent.export.rejected",
        unit="{item}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        labels=("exporter",),
        help="Data points, log records and spans that an endpoint rejected permanently, and "
        "numbers that a tracker did not get, by exporter.",
        read=lambda agent: {(e.exporter,): float(e.rejected) for e in agent.exports},
    ),
    Metric(
        name="mp_agent.export.last_success.timestamp",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.AGENT,
        labels=("exporter",),
        help="Unix time of the last successful push; absent before the first.",
        read=lambda agent: {(e.exporter,): e.last_success_unix_seconds for e in agent.exports},
    ),
)
