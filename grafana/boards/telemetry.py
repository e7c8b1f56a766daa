"""Telemetry: what the agent itself costs, drops and fails at."""

from grafana.panel import PER_SECOND, Board, Panel, Query, Row, help_of
from grafana.queries import by_run, increase, rate, series

_AGENTS = by_run("mp_agent_build_info", keep=("node_rank", "version"))
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
            description="Share of wall time that the probe takes on a rank's training thread, on "
            "average over the ranks.",
            unit="percentunit",
            minimum=0,
            queries=(
                Query(
                    f"{rate('mp_agent_probe_seconds_total')} "
                    f"/ on (cluster, namespace, job, run) "
                    f"count by (cluster, namespace, job, run) ({series('mp_agent_rank_up')})",
                    "{{run}}",
                ),
            ),
        ),
        Panel(
            id=2,
            title="Time to answer a scrape",
            description=help_of("mp_agent_scrape_duration_seconds"),
            unit="s",
            minimum=0,
            queries=(Query(by_run("mp_agent_scrape_duration_seconds"), "{{run}}"),),
        ),
        Panel(
            id=3,
            title="Node agents",
            description="Node agents that report, by version.",
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
        ),
        Panel(
            id=11,
            title="Dropped series",
            description=help_of("mp_agent_series_dropped_total"),
            minimum=0,
            soft_maximum=1,
            queries=(Query(rate("mp_agent_series_dropped_total"), "{{run}}"),),
            unit=PER_SECOND,
        ),
        Panel(
            id=12,
            title="Errors",
            description="Errors of the probes, and settings that were wrong and ignored.",
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(by_run("mp_agent_probe_errors_total", "sum"), "probe {{run}}"),
                Query(by_run("mp_agent_setting_errors_total", "sum"), "settings {{run}}"),
            ),
        ),
        Panel(
            id=13,
            title="Features that are not measured",
            description=help_of("mp_agent_unsupported_info"),
            minimum=0,
            width=24,
            height=6,
            queries=(
                Query(
                    f"max by (run, feature) ({series('mp_agent_unsupported_info')})",
                    "{{run}}: {{feature}}",
                    optional=True,
                ),
            ),
        ),
    ),
)


def _age(name: str, keep: tuple[str, ...]) -> str:
    """Return the times since something last succeeded, of runs that train."""
    return f"time() - {by_run(name, keep=keep)} and on (run) {_ACTIVE}"


_NODES = Row(
    title="Between nodes",
    panels=(
        Panel(
            id=20,
            title="Nodes",
            description=help_of("mp_agent_nodes_known")
            + " Beside it, the node agents that Prometheus scrapes: one that the root knows and "
            "Prometheus does not is missing from its targets.",
            width=8,
            minimum=0,
            decimals=0,
            queries=(
                Query(by_run("mp_agent_nodes_known"), "known to the root, {{run}}", optional=True),
                Query(f"count by (run) ({_AGENTS})", "scraped, {{run}}"),
            ),
        ),
        Panel(
            id=21,
            title="Failed pushes",
            description=help_of("mp_agent_push_failures_total")
            + " Beside it, what could not wait any longer.",
            width=8,
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(increase("mp_agent_push_failures_total"), "failed {{run}}"),
                Query(increase("mp_agent_reports_dropped_total"), "given up {{run}}"),
                Query(increase("mp_agent_rows_refused_total"), "refused by the root {{run}}"),
            ),
        ),
        Panel(
            id=22,
            title="Longest since a push",
            description="The ten nodes whose last successful push to the root agent is longest "
            "ago, in runs that train. Above some push intervals, the merged numbers lack that "
            "node.",
            width=8,
            unit="s",
            minimum=0,
            most_points=_POINTS,
            queries=(
                Query(
                    f"topk(10, {_age('mp_agent_push_last_success_timestamp_seconds', _NODE)})",
                    "{{run}} node {{node_rank}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=23,
            title="Rows on the network",
            description="Compressed bytes per second: what all nodes of a run have sent, and what "
            "its root agent has received. Both are the same unless pushes are lost.",
            width=24,
            height=6,
            unit="Bps",
            minimum=0,
            queries=(
                Query(rate("mp_agent_push_sent_bytes_total"), "sent {{run}}"),
                Query(rate("mp_agent_rows_received_bytes_total"), "received {{run}}"),
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
            queries=(
                Query(
                    increase("mp_agent_export_failures_total", keep=_EXPORTER),
                    "{{exporter}} {{run}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=31,
            title="Longest since an export",
            description="The ten exporters whose last successful push is longest ago, in runs that "
            "train.",
            unit="s",
            minimum=0,
            most_points=_POINTS,
            queries=(
                Query(
                    f"topk(10, {_age('mp_agent_export_last_success_timestamp_seconds', _BOTH)})",
                    "{{exporter}} {{run}} node {{node_rank}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=32,
            title="Flight records",
            description=help_of("mp_agent_flight_records_total")
            + " Beside them, those that could not be written.",
            minimum=0,
            soft_maximum=1,
            decimals=0,
            queries=(
                Query(by_run("mp_agent_flight_records_total", "sum"), "written {{run}}"),
                Query(by_run("mp_agent_flight_errors_total", "sum"), "not written {{run}}"),
            ),
        ),
    ),
)

TELEMETRY = Board(
    uid="mp-agent-self",
    title="mp_agent / Telemetry",
    description="What mp_agent itself costs, drops and fails at.",
    rows=(_COST, _LOSSES, _NODES, _OUTWARDS),
)
