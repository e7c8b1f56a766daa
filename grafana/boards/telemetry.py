"""Telemetry: what the agent itself costs, drops and fails at."""

from grafana.panel import PER_SECOND, Board, Column, Panel, Query, Row, View, help_of
from grafana.queries import RUN, aggregated, by_run, increase, rate, recorded, series
from mp_agent.alerting.conditions.agent import TELEMETRY_DEGRADED

_TELEMETRY_DEGRADED = (TELEMETRY_DEGRADED,)
_PER_RUN = ", ".join(RUN)
_AGENTS = by_run("mp_agent_build_info", keep=("node_rank", "version"))
_RANKS = aggregated(recorded("run:mp_agent_rank_up:count"), "max")
_ACTIVE = f"({by_run('mp_agent_run_active')} == 1)"
_NODE, _EXPORTER = ("node_rank",), ("exporter",)
_BOTH = (*_EXPORTER, *_NODE)
_POINTS = 200
"""Enough for a picture; every one looks at all nodes."""

_COST = Row(
    title="Cost",
    panels=(
        Panel(
            id=1,
            title="Probe time per rank",
            description="Share of wall time that the probe uses on a rank's training thread, "
            "averaged over the ranks.",
            unit="percentunit",
            minimum=0,
            queries=(
                Query(
                    f"{rate('mp_agent_probe_seconds_total')} / on ({_PER_RUN}) {_RANKS}",
                    "{{run}}",
                ),
            ),
        ),
        Panel(
            id=4,
            title="Overhead by rank",
            description=help_of("mp_agent_overhead_ratio") + " The median and the largest of all "
            "ranks, as the rules record them.",
            unit="percentunit",
            minimum=0,
            nothing="No rank has measured it, or the rules are not loaded",
            queries=tuple(
                Query(
                    aggregated(
                        recorded(f"run_resource:mp_agent_overhead_ratio:{aggregate}"),
                        "max",
                        keep=("resource",),
                    ),
                    f"{{{{run}}}} {{{{resource}}}}, {word}",
                    optional=True,
                )
                for aggregate, word in (("max", "largest"), ("median", "median"))
            ),
        ),
        Panel(
            id=5,
            title="Device time of the probe",
            description="Share of time that measuring gradients takes on a rank's device, averaged "
            "over the ranks, as the rules record it.",
            unit="percentunit",
            minimum=0,
            soft_maximum=0.01,
            nothing="No rank has measured it, or the rules are not loaded",
            queries=(
                Query(
                    aggregated(recorded("run:mp_agent_probe_device_seconds_total:rate"), "max"),
                    "{{run}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=2,
            title="Time to answer a scrape",
            description=help_of("mp_agent_scrape_duration_seconds"),
            width=12,
            unit="s",
            minimum=0,
            queries=(Query(by_run("mp_agent_scrape_duration_seconds"), "{{run}}"),),
        ),
        Panel(
            id=3,
            title="Node agents",
            description="Node agents that report, by version.",
            width=12,
            minimum=0,
            queries=(Query(f"count by (version) ({_AGENTS})", "{{version}}"),),
        ),
    ),
)

_LOSSES = Row(
    title="What is lost",
    panels=(
        Panel(
            id=10,
            title="Dropped records",
            description=help_of("mp_agent_records_dropped_total"),
            minimum=0,
            soft_maximum=1,
            queries=(Query(by_run("mp_agent_records_dropped_total", "sum"), "{{run}}"),),
            runbooks=_TELEMETRY_DEGRADED,
        ),
        Panel(
            id=11,
            title="Dropped series",
            description=help_of("mp_agent_series_dropped_total"),
            minimum=0,
            soft_maximum=1,
            queries=(Query(rate("mp_agent_series_dropped_total"), "{{run}}"),),
            runbooks=_TELEMETRY_DEGRADED,
            unit=PER_SECOND,
        ),
        Panel(
            id=12,
            title="Errors",
            description="Errors of the probes, and invalid settings that were ignored.",
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(by_run("mp_agent_probe_errors_total", "sum"), "{{run}}: probe"),
                Query(by_run("mp_agent_setting_errors_total", "sum"), "{{run}}: settings"),
            ),
            runbooks=_TELEMETRY_DEGRADED,
        ),
        Panel(
            id=13,
            title="Features that are not measured",
            description=help_of("mp_agent_unsupported_info"),
            view=View.TABLE,
            width=24,
            height=5,
            nothing="Everything is measured",
            columns=(
                Column(name="run", title="Run", width=300),
                Column(name="feature", title="Feature"),
            ),
            queries=(
                Query(
                    f"max by (run, feature) ({series('mp_agent_unsupported_info')})",
                    instant=True,
                    optional=True,
                ),
            ),
        ),
    ),
)


def _age(name: str, keep: tuple[str, ...]) -> str:
    """Return the times since something last succeeded, of runs that train."""
    return f"time() - {by_run(name, keep=keep)} and on ({_PER_RUN}) {_ACTIVE}"


_NODES = Row(
    title="Between nodes",
    panels=(
        Panel(
            id=20,
            title="Nodes",
            description=help_of("mp_agent_nodes_known")
            + " For comparison, the node agents that Prometheus scrapes: an agent that only the "
            "root knows is missing from the targets.",
            width=12,
            minimum=0,
            decimals=0,
            queries=(
                Query(by_run("mp_agent_nodes_known"), "{{run}}: known to the root", optional=True),
                Query(f"count by (run) ({_AGENTS})", "{{run}}: scraped"),
            ),
        ),
        Panel(
            id=21,
            title="Failed pushes",
            description=help_of("mp_agent_push_failures_total") + " Also shown: discarded reports.",
            width=12,
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(increase("mp_agent_push_failures_total"), "{{run}}: failed"),
                Query(increase("mp_agent_reports_dropped_total"), "{{run}}: discarded"),
                Query(increase("mp_agent_rows_refused_total"), "{{run}}: rejected by the root"),
            ),
        ),
        Panel(
            id=22,
            title="Longest since a push",
            description="The ten nodes whose last successful push to the root agent is longest "
            "ago, in active runs. Above a few push intervals, the merged metrics do not include "
            "that node.",
            width=12,
            unit="s",
            minimum=0,
            nothing="No node pushes: single node, or no active run",
            most_points=_POINTS,
            queries=(
                Query(
                    f"topk(10, {_age('mp_agent_push_last_success_timestamp_seconds', _NODE)})",
                    "{{run}}: node {{node_rank}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=23,
            title="Rows on the network",
            description="Compressed bytes per second: sent by all nodes of a run, and received "
            "by its root agent. Both are equal unless pushes are lost.",
            width=12,
            unit="Bps",
            minimum=0,
            queries=(
                Query(rate("mp_agent_push_sent_bytes_total"), "{{run}}: sent"),
                Query(rate("mp_agent_rows_received_bytes_total"), "{{run}}: received"),
            ),
        ),
    ),
)

_OUTWARDS = Row(
    title="Exports and flight records",
    panels=(
        Panel(
            id=30,
            title="Failed exports",
            description=help_of("mp_agent_export_failures_total"),
            minimum=0,
            soft_maximum=1,
            nothing="No exporter pushes",
            queries=(
                Query(
                    increase("mp_agent_export_failures_total", keep=_EXPORTER),
                    "{{run}}: {{exporter}}",
                    optional=True,
                ),
                Query(
                    increase("mp_agent_export_rejected_total", keep=_EXPORTER),
                    "{{run}}: {{exporter}}, items rejected permanently",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=31,
            title="Longest since an export",
            description="The ten exporters whose last successful push is longest ago, in active "
            "runs.",
            unit="s",
            minimum=0,
            nothing="No exporter pushes",
            most_points=_POINTS,
            queries=(
                Query(
                    f"topk(10, {_age('mp_agent_export_last_success_timestamp_seconds', _BOTH)})",
                    "{{run}}: {{exporter}} of node {{node_rank}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=32,
            title="Flight records",
            description=help_of("mp_agent_flight_records_total")
            + " Also shown: records that could not be written.",
            minimum=0,
            soft_maximum=1,
            decimals=0,
            queries=(
                Query(by_run("mp_agent_flight_records_total", "sum"), "{{run}}: written"),
                Query(by_run("mp_agent_flight_errors_total", "sum"), "{{run}}: not written"),
            ),
        ),
    ),
)

TELEMETRY = Board(
    uid="mp-agent-self",
    title="mp_agent / Telemetry",
    description="Cost, losses and errors of mp_agent itself.",
    rows=(_COST, _LOSSES, _NODES, _OUTWARDS),
)
