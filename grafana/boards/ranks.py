"""Ranks: who lags, who is gone, who differs; and the GPU below."""

from grafana.panel import Board, Panel, Query, Row, View, help_of
from grafana.queries import RUN, by_run, series, worst
from grafana.style import ANY_IS_NOTABLE, COVERAGE

_RANK = ("rank",)
_BY_GPU = "* on (UUID) group_left (rank) "


def _with_rank(metric: str, aggregate: str = "max") -> str:
    """Return a series of dcgm-exporter for the run's GPUs, worst first, by rank."""
    known = series("mp_agent_rank_info", 'gpu_uuid!=""')
    info = f'label_replace({known}, "UUID", "$1", "gpu_uuid", "(.+)")'
    return f"topk(10, {aggregate} by (UUID) ({metric}) {_BY_GPU}max by (UUID, rank) ({info}))"


_LAG = (
    f"{by_run('mp_agent_rank_step')} - on ({', '.join(RUN)}) group_right "
    f"{by_run('mp_agent_rank_step', keep=_RANK)}"
)

_PHASES = by_run("mp_agent_rank_phase_info", keep=("rank", "phase"))

_GLANCE = Row(
    title="At a glance",
    panels=(
        Panel(
            id=1,
            title="Ranks up",
            description="Ranks whose process is there, of all that were seen.",
            view=View.STAT,
            width=6,
            height=4,
            decimals=0,
            queries=(Query(f"sum({by_run('mp_agent_rank_up', keep=_RANK)})"),),
        ),
        Panel(
            id=2,
            title="Ranks gone",
            description=help_of("mp_agent_rank_up"),
            view=View.STAT,
            width=6,
            height=4,
            decimals=0,
            steps=ANY_IS_NOTABLE,
            queries=(Query(f"sum(1 - {by_run('mp_agent_rank_up', keep=_RANK)})"),),
        ),
        Panel(
            id=3,
            title="Missing ranks",
            description=help_of("mp_agent_missing_rank_info"),
            view=View.STAT,
            width=6,
            height=4,
            decimals=0,
            steps=ANY_IS_NOTABLE,
            queries=(Query(f"count({series('mp_agent_missing_rank_info')}) or vector(0)"),),
        ),
        Panel(
            id=4,
            title="Coverage",
            description=help_of("mp_agent_coverage_ratio"),
            view=View.STAT,
            width=6,
            height=4,
            unit="percentunit",
            steps=COVERAGE,
            queries=(Query(by_run("mp_agent_coverage_ratio", "min")),),
        ),
    ),
)

_LAGGARDS = Row(
    title="Lag and pace",
    panels=(
        Panel(
            id=10,
            title="Ranks by step lag",
            description="How many ranks are how many steps behind the foremost, over time. All at "
            "0 is healthy: in synchronous training nobody runs ahead.",
            view=View.HEATMAP,
            width=12,
            queries=(Query(f'count_values("lag", {_LAG})', "{{lag}}"),),
        ),
        Panel(
            id=11,
            title="Furthest behind",
            description="The ten ranks that are furthest behind the foremost, in steps.",
            width=12,
            minimum=0,
            queries=(Query(f"topk(10, {_LAG})", "rank {{rank}}"),),
        ),
        Panel(
            id=12,
            title="Ranks by time before the first collective",
            description="How many ranks take how long before they first wait for others, in steps "
            "of a tenth: waiting is not slowness, so only this time tells a straggler.",
            view=View.HEATMAP,
            width=12,
            unit="s",
            queries=(
                Query(
                    'count_values("seconds", round('
                    f"{by_run('mp_agent_rank_compute_seconds', keep=_RANK)}, 0.01))",
                    "{{seconds}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=13,
            title="Slowest before the first collective",
            description=help_of("mp_agent_rank_compute_seconds")
            + " The line that leaves the median is the straggler.",
            width=12,
            unit="s",
            minimum=0,
            queries=(
                Query(
                    worst("mp_agent_rank_compute_seconds", 10, keep=_RANK),
                    "rank {{rank}}",
                    optional=True,
                ),
                Query(
                    f"quantile(0.5, {by_run('mp_agent_rank_compute_seconds', keep=_RANK)})",
                    "median",
                    optional=True,
                ),
            ),
        ),
    ),
)

_DIFFERENCES = Row(
    title="Differences",
    panels=(
        Panel(
            id=20,
            title="Spread of the ranks' losses",
            description="Smallest, median and largest of the ranks' own losses. One rank far off "
            "points at its data or its hardware.",
            queries=(
                Query(f"min({by_run('mp_agent_rank_loss', keep=_RANK)})", "smallest"),
                Query(f"quantile(0.5, {by_run('mp_agent_rank_loss', keep=_RANK)})", "median"),
                Query(f"max({by_run('mp_agent_rank_loss', keep=_RANK)})", "largest"),
            ),
        ),
        Panel(
            id=21,
            title="Ranks with a non-finite loss",
            description=help_of("mp_agent_rank_loss_nonfinite_steps_total"),
            minimum=0,
            queries=(
                Query(
                    "topk(10, "
                    + by_run("mp_agent_rank_loss_nonfinite_steps_total", keep=_RANK)
                    + " > 0)",
                    "rank {{rank}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=22,
            title="Ranks by phase",
            description="How many ranks are in which phase. A few that stay elsewhere are stuck.",
            minimum=0,
            queries=(Query(f"count by (phase) ({_PHASES})", "{{phase}}"),),
        ),
    ),
)

_GPU = Row(
    title="GPU (dcgm-exporter)",
    collapsed=True,
    panels=(
        Panel(
            id=30,
            title="Hottest GPUs",
            description="Temperature of the run's GPUs from dcgm-exporter, joined by UUID.",
            unit="celsius",
            queries=(Query(_with_rank("DCGM_FI_DEV_GPU_TEMP"), "rank {{rank}}", optional=True),),
        ),
        Panel(
            id=31,
            title="Power",
            description="Power draw of the run's GPUs from dcgm-exporter, joined by UUID.",
            unit="watt",
            queries=(Query(_with_rank("DCGM_FI_DEV_POWER_USAGE"), "rank {{rank}}", optional=True),),
        ),
        Panel(
            id=32,
            title="XID errors",
            description="Last XID error of the run's GPUs from dcgm-exporter; 0 is none. One on "
            "the rank that turned non-finite first says that it is the hardware.",
            queries=(Query(_with_rank("DCGM_FI_DEV_XID_ERRORS"), "rank {{rank}}", optional=True),),
        ),
    ),
)

RANKS = Board(
    uid="mp-agent-ranks",
    title="mp_agent / Ranks",
    description="Which rank lags, is gone, or differs from the others.",
    one_run=True,
    rows=(_GLANCE, _LAGGARDS, _DIFFERENCES, _GPU),
)
