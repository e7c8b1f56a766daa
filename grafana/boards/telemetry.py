"""Telemetry: what the agent itself costs, drops and fails at."""

from grafana.panel import PER_SECOND, Board, Panel, Query, Row, help_of
from grafana.queries import by_run, rate, series

_AGENTS = by_run("mp_agent_build_info", keep=("node_rank", "version"))

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
            queries=(Query(by_run("mp_agent_records_dropped_total", "sum"), "{{run}}"),),
        ),
        Panel(
            id=11,
            title="Dropped series",
            description=help_of("mp_agent_series_dropped_total"),
            minimum=0,
            queries=(Query(rate("mp_agent_series_dropped_total"), "{{run}}"),),
            unit=PER_SECOND,
        ),
        Panel(
            id=12,
            title="Errors",
            description="Errors of the probes, and settings that were wrong and ignored.",
            minimum=0,
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

TELEMETRY = Board(
    uid="mp-agent-self",
    title="mp_agent / Telemetry",
    description="What mp_agent itself costs, drops and fails at.",
    rows=(_COST, _LOSSES),
)
