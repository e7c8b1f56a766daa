"""Ranks: who lags, who is gone, who differs; and the GPU below."""

from grafana.panel import Board, Column, Panel, Query, Row, View, above, help_of
from grafana.queries import RUN, aggregated, by_run, chosen, increase, series, worst_over_range
from grafana.style import AGREEMENT, ANY_IS_NOTABLE, COVERAGE

_RANK = ("rank",)
_POINTS = 100
"""Enough for a picture; every one looks at all ranks."""
_HEATMAP_POINTS = 60
_BY_GPU = "* on (UUID) group_left (rank) "


def _with_rank(metric: str, aggregate: str = "max") -> str:
    """Return a series of dcgm-exporter for the run's GPUs, worst first, by rank."""
    known = series("mp_agent_rank_info", 'gpu_uuid!=""')
    info = f'label_replace({known}, "UUID", "$1", "gpu_uuid", "(.+)")'
    return f"topk(10, {aggregate} by (UUID) ({metric}) {_BY_GPU}max by (UUID, rank) ({info}))"


_RUN = ", ".join(RUN)
_STEP = series("mp_agent_rank_step")
_LATEST = f"last_over_time({_STEP}[$__range] @ end())"
_FURTHEST_BEHIND = f"bottomk(10, {aggregated(_LATEST, 'max', keep=_RANK)})"
"""At the end of the time range."""
_THEIR_STEPS = aggregated(chosen(_STEP, _FURTHEST_BEHIND, keep=_RANK), "max", keep=_RANK)
_LAG = f"scalar(max({_STEP})) - {_THEIR_STEPS}"

_COMPUTE = series("mp_agent_rank_compute_seconds")
_SLOWEST = (
    f"{by_run('mp_agent_straggler_slowdown')} * on ({_RUN}) group_right "
    f"{by_run('mp_agent_straggler_info', keep=_RANK)}"
)

_ALIVE = f"({series('mp_agent_rank_up')} == 1)"
_LAST_STEPS = chosen(
    chosen(series("mp_agent_rank_last_step_timestamp_seconds"), _FURTHEST_BEHIND, keep=_RANK),
    _ALIVE,
    keep=_RANK,
)

_PHASES = by_run("mp_agent_rank_phase_info", keep=("rank", "phase"))


def _stat(number: int, title: str, description: str, query: Query, **more: object) -> Panel:
    return Panel(
        id=number,
        title=title,
        description=description,
        queries=(query,),
        view=View.STAT,
        width=4,
        height=4,
        **more,  # type: ignore[arg-type]
    )


_GLANCE = Row(
    title="At a glance",
    panels=(
        _stat(
            1,
            "Ranks up",
            "Ranks whose process is there, of all that were seen.",
            Query(f"sum({by_run('mp_agent_rank_up', keep=_RANK)})", instant=True),
            decimals=0,
        ),
        _stat(
            2,
            "Ranks gone",
            help_of("mp_agent_rank_up"),
            Query(f"sum(1 - {by_run('mp_agent_rank_up', keep=_RANK)})", instant=True),
            decimals=0,
            steps=ANY_IS_NOTABLE,
        ),
        _stat(
            3,
            "Missing ranks",
            help_of("mp_agent_missing_rank_info"),
            Query(f"count({series('mp_agent_missing_rank_info')}) or vector(0)", instant=True),
            decimals=0,
            steps=ANY_IS_NOTABLE,
        ),
        _stat(
            4,
            "Coverage",
            help_of("mp_agent_coverage_ratio"),
            Query(by_run("mp_agent_coverage_ratio", "min")),
            unit="percentunit",
            steps=COVERAGE,
        ),
        _stat(
            5,
            "Lagging ranks",
            help_of("mp_agent_ranks_lagging"),
            Query(by_run("mp_agent_ranks_lagging")),
            decimals=0,
            steps=ANY_IS_NOTABLE,
        ),
        _stat(
            6,
            "Slowest rank",
            "The rank that takes longest before its first collective; orange where it is slow "
            "enough to be a straggler.",
            Query(_SLOWEST, "{{rank}}", instant=True, optional=True),
            steps=above(straggler_ratio="orange"),
            label="rank",
        ),
    ),
)


def _named(
    number: int, title: str, name: str, columns: tuple[Column, ...], more: str = " Empty is good."
) -> Panel:
    """Return a table of the ranks that an info metric names, twenty at most."""
    named = by_run(name, keep=tuple(column.name for column in columns))
    return Panel(
        id=number,
        title=title,
        description=help_of(name) + more,
        view=View.TABLE,
        width=8,
        height=6,
        columns=columns,
        queries=(Query(f"topk(20, {named})", instant=True, optional=True),),
    )


_NAMES = Row(
    title="Which ranks",
    panels=(
        _named(
            50,
            "Which lag",
            "mp_agent_lagging_rank_info",
            (
                Column(name="rank", title="Rank", width=100),
                Column(name="phase", title="Where it stands"),
            ),
        ),
        _named(
            51,
            "Which are missing",
            "mp_agent_missing_rank_info",
            (Column(name="rank", title="Rank"),),
            " Twenty of them at most. Empty is good.",
        ),
        _named(
            52,
            "Which differ",
            "mp_agent_divergent_ranks_info",
            (
                Column(name="kind", title="What differs", width=120),
                Column(name="step", title="Step", width=100),
                Column(name="ranks", title="Ranks"),
            ),
        ),
    ),
)

_LAGGARDS = Row(
    title="Lag and pace",
    panels=(
        Panel(
            id=10,
            title="Ranks by step lag",
            description="How many ranks are how many steps behind the foremost, over time, in "
            "steps of five; the uppermost row is 50 and everything beyond. Nodes are scraped at "
            "different moments, so a little is no lag; a band that rises is.",
            view=View.HEATMAP,
            width=12,
            most_points=_HEATMAP_POINTS,
            queries=(
                Query(
                    f'count_values("lag", clamp_max(round(scalar(max({_STEP})) - {_STEP}, 5), 50))',
                    "{{lag}}",
                ),
            ),
        ),
        Panel(
            id=11,
            title="Furthest behind",
            description="The ten ranks that are furthest behind at the end of the time shown, in "
            "steps behind the foremost.",
            width=12,
            minimum=0,
            decimals=0,
            most_points=_POINTS,
            queries=(Query(f"topk(10, {_LAG})", "rank {{rank}}"),),
        ),
        Panel(
            id=12,
            title="Ranks by time before the first collective",
            description="How many ranks take how many times the median before they first wait for "
            "others: waiting is not slowness, so only this time tells a straggler. All near 1 is "
            "healthy; the uppermost row is everything beyond.",
            view=View.HEATMAP,
            width=12,
            most_points=_HEATMAP_POINTS,
            queries=(
                Query(
                    'count_values("ratio", clamp_max(round('
                    f"{_COMPUTE} / scalar(quantile(0.5, {_COMPUTE})), 0.1), 3))",
                    "{{ratio}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=13,
            title="Slowest before the first collective",
            description=help_of("mp_agent_rank_compute_seconds")
            + " The line that leaves the median is the straggler. Drawn are the ten ranks with the "
            "largest values anywhere in the time shown.",
            width=12,
            unit="s",
            minimum=0,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range("mp_agent_rank_compute_seconds", 10, keep=_RANK),
                    "rank {{rank}}",
                    optional=True,
                ),
                Query(f"quantile(0.5, {_COMPUTE})", "median", optional=True),
            ),
        ),
        Panel(
            id=15,
            title="Slowdown of the slowest rank",
            description=help_of("mp_agent_straggler_slowdown")
            + " The line's name is the rank; one that stays the same is a bad host, one that "
            "changes is chance. Dashed: where it counts as a straggler.",
            minimum=1,
            decimals=1,
            lines=True,
            steps=above(straggler_ratio="orange"),
            most_points=_POINTS,
            queries=(Query(f"topk(10, {_SLOWEST})", "rank {{rank}}", optional=True),),
        ),
        Panel(
            id=16,
            title="What the slowest rank costs",
            description=help_of("mp_agent_straggler_delay_seconds")
            + " Beside it, how long a step usually takes: a twentieth of that matters.",
            unit="s",
            minimum=0,
            queries=(
                Query(by_run("mp_agent_straggler_delay_seconds"), "delay", optional=True),
                Query(by_run("mp_agent_step_usual_seconds"), "usual step", optional=True),
            ),
        ),
        Panel(
            id=14,
            title="Longest without a step",
            description="Time since the last step of the ten living ranks that are silent longest "
            "at the end of the time shown. All rise together in an evaluation or a checkpoint; one "
            "that rises alone is stuck.",
            unit="s",
            minimum=0,
            most_points=_POINTS,
            queries=(
                Query(
                    f"topk(10, time() - {aggregated(_LAST_STEPS, 'max', keep=_RANK)})",
                    "rank {{rank}}",
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
            id=23,
            title="Replicas",
            description=help_of("mp_agent_replica_divergence"),
            view=View.TIMELINE,
            width=8,
            height=6,
            texts=AGREEMENT,
            queries=(
                Query(
                    by_run("mp_agent_replica_divergence", keep=("kind",)), "{{kind}}", optional=True
                ),
            ),
        ),
        Panel(
            id=24,
            title="Steps on which replicas differed",
            description=help_of("mp_agent_replica_divergence_steps_total") + " One is too many.",
            width=8,
            height=6,
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(
                    increase("mp_agent_replica_divergence_steps_total", keep=("kind",)), "{{kind}}"
                ),
            ),
        ),
        Panel(
            id=22,
            title="Ranks by phase",
            description="How many ranks are in which phase. A few that stay elsewhere are stuck.",
            width=8,
            height=6,
            minimum=0,
            most_points=_POINTS,
            queries=(Query(f"count by (phase) ({_PHASES})", "{{phase}}"),),
        ),
        Panel(
            id=20,
            title="Spread of the ranks' losses",
            description="Smallest, median and largest of the ranks' own losses. One rank far off "
            "points at its data or its hardware.",
            width=12,
            most_points=_POINTS,
            queries=(
                Query(f"min({series('mp_agent_rank_loss')})", "smallest"),
                Query(f"quantile(0.5, {series('mp_agent_rank_loss')})", "median"),
                Query(f"max({series('mp_agent_rank_loss')})", "largest"),
            ),
        ),
        Panel(
            id=21,
            title="Ranks with a non-finite loss",
            description=help_of("mp_agent_rank_loss_nonfinite_steps_total")
            + " The ten ranks with the most.",
            width=12,
            minimum=0,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range("mp_agent_rank_loss_nonfinite_steps_total", 10, keep=_RANK)
                    + " > 0",
                    "rank {{rank}}",
                    optional=True,
                ),
            ),
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
    rows=(_GLANCE, _NAMES, _LAGGARDS, _DIFFERENCES, _GPU),
)
