"""Lag and pace of the ranks: heatmaps of all, lines of the worst ten."""

from grafana.boards.ranks.glance import SLOWEST
from grafana.panel import Panel, Query, Row, View, above, help_of
from grafana.queries import RUN, aggregated, by_run, chosen, rate, series, worst_over_range
from mp_agent.alerting.conditions.ranks import RANK_STALLED, RANK_STRAGGLER

_RANK = ("rank",)
_POINTS = 100
"""Enough for a picture; every one looks at all ranks."""
_HEATMAP_POINTS = 60

_STEP = series("mp_agent_rank_step")
_LATEST = f"last_over_time({_STEP}[$__range] @ end())"
_FURTHEST_BEHIND = f"bottomk(10, {aggregated(_LATEST, 'max', keep=_RANK)})"
"""The ranks furthest behind at the end of the time range."""
_THEIR_STEPS = aggregated(chosen(_STEP, _FURTHEST_BEHIND, keep=_RANK), "max", keep=_RANK)
_LAG = f"scalar(max({_STEP})) - {_THEIR_STEPS}"

_COMPUTE = series("mp_agent_rank_compute_seconds")

_PARTS = "mp_agent_rank_step_part_seconds_total"
_OWN_PARTS = series(_PARTS, 'part!="backward"')
"""Parts of a rank's own; in backward it waits for others."""
_RANK_AND_PART = ("rank", "part")


def _less_mean(rates: str, of_ranks: str) -> str:
    """Return the rates of some ranks, less the mean over all ranks of the same part."""
    own = aggregated(of_ranks, "sum", keep=_RANK_AND_PART)
    mean = aggregated(rates, "avg", keep=("part",))
    return f"{own} - on ({', '.join((*RUN, 'part'))}) group_left () {mean}"


_RATES = f"rate({_OWN_PARTS}[$__rate_interval])"
_OVER_RANGE = f"rate({_OWN_PARTS}[$__range] @ end())"
_FURTHEST_FROM_MEAN = f"topk(10, {_less_mean(_OVER_RANGE, _OVER_RANGE)})"
_BEYOND_MEAN = _less_mean(_RATES, chosen(_RATES, _FURTHEST_FROM_MEAN, keep=_RANK_AND_PART))

_ALIVE = f"({series('mp_agent_rank_up')} == 1)"
_LAST_STEPS = chosen(
    chosen(series("mp_agent_rank_last_step_timestamp_seconds"), _FURTHEST_BEHIND, keep=_RANK),
    _ALIVE,
    keep=_RANK,
)

PACE = Row(
    title="Lag and pace",
    panels=(
        Panel(
            id=10,
            title="Ranks by step lag",
            description="Distribution of the ranks' step lag behind the furthest rank over "
            "time, in steps of five; the top row is 50 and above. Nodes are scraped at "
            "different times, so a small lag is normal; a rising band is not.",
            view=View.HEATMAP,
            width=12,
            most_points=_HEATMAP_POINTS,
            queries=(
                Query(
                    f'count_values("lag", clamp_max(round(scalar(max({_STEP})) - {_STEP}, 5), 50))',
                    "{{lag}}",
                ),
            ),
            runbooks=(RANK_STALLED,),
        ),
        Panel(
            id=11,
            title="Furthest behind",
            description="The ten ranks that are furthest behind at the end of the time range, "
            "in steps behind the furthest rank.",
            width=12,
            minimum=0,
            decimals=0,
            most_points=_POINTS,
            queries=(Query(f"topk(10, {_LAG})", "rank {{rank}}"),),
        ),
        Panel(
            id=12,
            title="Ranks by time before the first collective",
            description="Distribution of the ranks' time before their first collective, divided "
            "by the median. Time spent waiting is excluded, so this identifies a straggler. "
            "Values near 1 are healthy; the top row contains all larger values.",
            view=View.HEATMAP,
            width=12,
            nothing="No collective was seen",
            most_points=_HEATMAP_POINTS,
            queries=(
                Query(
                    'count_values("ratio", clamp_max(round('
                    f"{_COMPUTE} / scalar(quantile(0.5, {_COMPUTE})), 0.1), 3))",
                    "{{ratio}}",
                    optional=True,
                ),
            ),
            runbooks=(RANK_STRAGGLER,),
        ),
        Panel(
            id=13,
            title="Slowest before the first collective",
            description=help_of("mp_agent_rank_compute_seconds")
            + " The line that departs from the median is the straggler. The panel shows the ten "
            "ranks with the largest values within the time range.",
            width=12,
            unit="s",
            minimum=0,
            nothing="No collective was seen",
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
            + " The legend shows the rank; a constant rank indicates a faulty host, a changing "
            "one is random. Dashed: limit for a straggler.",
            minimum=1,
            soft_maximum=1.5,
            decimals=1,
            nothing="No collective was seen",
            lines=True,
            steps=above(straggler_ratio="orange"),
            most_points=_POINTS,
            queries=(Query(f"topk(10, {SLOWEST})", "rank {{rank}}", optional=True),),
            runbooks=(RANK_STRAGGLER,),
        ),
        Panel(
            id=16,
            title="What the slowest rank costs",
            description=help_of("mp_agent_straggler_delay_seconds")
            + " For comparison, the usual step time: a twentieth of it is significant.",
            unit="s",
            minimum=0,
            nothing="No collective was seen",
            queries=(
                Query(by_run("mp_agent_straggler_delay_seconds"), "delay", optional=True),
                Query(by_run("mp_agent_step_usual_seconds"), "usual step", optional=True),
            ),
        ),
        Panel(
            id=17,
            title="Step time by part, all ranks",
            description="Share of the ranks' time in each part of their steps. "
            + help_of("mp_agent_rank_step_part_seconds_total"),
            width=12,
            unit="percentunit",
            minimum=0,
            most_points=_POINTS,
            nothing="No part was timed",
            queries=(
                Query(
                    f"{rate(_PARTS, keep=('part',))} / on ({', '.join(RUN)}) group_left () "
                    f"({rate(_PARTS)} > 0)",
                    "{{part}}",
                    optional=True,
                ),
            ),
            runbooks=(RANK_STRAGGLER,),
        ),
        Panel(
            id=18,
            title="Furthest from the mean, by part",
            description="The ten ranks and parts, of data, forward, optimizer and other, in which "
            "a rank spends more of its time than the mean of the ranks, over the time range: it is "
            "slow there, and the others wait for it in backward.",
            width=12,
            unit="percentunit",
            minimum=0,
            most_points=_POINTS,
            nothing="No part was timed",
            queries=(Query(f"topk(10, {_BEYOND_MEAN})", "rank {{rank}}, {{part}}", optional=True),),
            runbooks=(RANK_STRAGGLER,),
        ),
        Panel(
            id=14,
            title="Longest without a step",
            description="Time since the last step of the ten live ranks with the longest time "
            "at the end of the range. All rise together in an evaluation or a checkpoint; a "
            "rank that rises alone is stuck.",
            unit="s",
            minimum=0,
            nothing="No rank is alive",
            most_points=_POINTS,
            queries=(
                Query(
                    f"topk(10, time() - {aggregated(_LAST_STEPS, 'max', keep=_RANK)})",
                    "rank {{rank}}",
                    optional=True,
                ),
            ),
            runbooks=(RANK_STALLED,),
        ),
    ),
)
