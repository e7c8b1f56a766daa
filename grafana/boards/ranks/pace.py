"""Lag and pace of the ranks: heatmaps of all, lines of the worst ten."""

from grafana.boards.ranks.glance import SLOWEST
from grafana.panel import Panel, Query, Row, View, above, help_of
from grafana.queries import RUN, aggregated, by_run, chosen, recorded, worst_of
from mp_agent.alerting.conditions.ranks import RANK_STALLED, RANK_STRAGGLER

_RANK = ("rank",)
_OR_NO_RULES = ", or the rules are not loaded"
_HEATMAP_POINTS = 60

_LAG = recorded("run_rank:mp_agent_rank_step:lag")
_COMPUTE = "mp_agent_rank_compute_seconds"
_LONGEST = recorded(f"run_rank:{_COMPUTE}:max")
_MEDIAN = f"max({recorded(f'run:{_COMPUTE}:median')})"
_AGE = "mp_agent_rank_last_step_timestamp_seconds:age"

_PARTS = "mp_agent_rank_step_part_seconds_total"
_RANK_AND_PART = ("rank", "part")
_MEAN = aggregated(recorded(f"run_part:{_PARTS}:rate"), "max", keep=("part",))
_OWN = recorded(f"run_rank_part:{_PARTS}:rate")
_OVER_RANGE = aggregated(f"avg_over_time({_OWN}[$__range] @ end())", "max", keep=_RANK_AND_PART)
_SHOWN = aggregated(
    chosen(_OWN, f"topk(10, {_OVER_RANGE})", keep=_RANK_AND_PART), "max", keep=_RANK_AND_PART
)
_BEYOND_MEAN = f"{_SHOWN} - on ({', '.join((*RUN, 'part'))}) group_left () {_MEAN}"

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
                Query(f"sum by (lag) ({recorded('run_lag:mp_agent_rank_step:count')})", "{{lag}}"),
            ),
            runbooks=(RANK_STALLED,),
        ),
        Panel(
            id=11,
            title="Furthest behind",
            description="The ten ranks that are furthest behind within the time range, in steps "
            "behind the furthest rank, of those by more than five.",
            nothing=f"No rank is more than five steps behind{_OR_NO_RULES}",
            width=12,
            minimum=0,
            decimals=0,
            queries=(Query(worst_of(_LAG, 10, keep=_RANK), "rank {{rank}}", optional=True),),
        ),
        Panel(
            id=12,
            title="Ranks by time before the first collective",
            description="Distribution of the ranks' time before their first collective, divided "
            "by the median. Time spent waiting is excluded, so this identifies a straggler. "
            "Values near 1 are healthy; the top row contains all larger values.",
            view=View.HEATMAP,
            width=12,
            nothing=f"No collective was seen{_OR_NO_RULES}",
            most_points=_HEATMAP_POINTS,
            queries=(
                Query(
                    f"sum by (ratio) ({recorded(f'run_ratio:{_COMPUTE}:count')})",
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
            + " The longest and the median of all ranks, and the ten ranks with the largest values "
            "within the time range, of those 10 % above the median: a line that stays there is a "
            "straggler.",
            width=12,
            unit="s",
            minimum=0,
            nothing=f"No collective was seen{_OR_NO_RULES}",
            queries=(
                Query(
                    worst_of(_LONGEST, 10, keep=_RANK),
                    "rank {{rank}}",
                    optional=True,
                ),
                Query(f"max({recorded(f'run:{_COMPUTE}:max')})", "longest", optional=True),
                Query(_MEDIAN, "median", optional=True),
            ),
        ),
        Panel(
            id=19,
            title="Slowest nodes before the first collective",
            description="The time of the fastest rank of a node, of the ten nodes with the largest "
            "within the time range, where it is 10 % above the median of all ranks: the whole node "
            "is slow, not one of its GPUs.",
            width=12,
            unit="s",
            minimum=0,
            nothing=f"No node is slow{_OR_NO_RULES}",
            queries=(
                Query(
                    worst_of(recorded(f"run_node:{_COMPUTE}:min"), 10, keep=("instance",)),
                    "{{instance}}",
                    optional=True,
                ),
                Query(_MEDIAN, "median of all ranks", optional=True),
            ),
            runbooks=(RANK_STRAGGLER,),
        ),
        Panel(
            id=15,
            title="Slowdown of the slowest rank",
            description=help_of("mp_agent_straggler_slowdown")
            + " The legend shows the rank; a constant rank indicates a faulty host, a changing "
            "one is random. Dashed: limit for a straggler.",
            width=6,
            minimum=1,
            soft_maximum=1.5,
            decimals=1,
            nothing="No collective was seen",
            lines=True,
            steps=above(straggler_ratio="orange"),
            queries=(Query(f"topk(10, {SLOWEST})", "rank {{rank}}", optional=True),),
            runbooks=(RANK_STRAGGLER,),
        ),
        Panel(
            id=16,
            title="What the slowest rank costs",
            description=help_of("mp_agent_straggler_delay_seconds")
            + " For comparison, the usual step time: a twentieth of it is significant.",
            width=6,
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
            description="Share of the ranks' time in each part of their steps. " + help_of(_PARTS),
            width=12,
            unit="percentunit",
            minimum=0,
            nothing="Needs measure_step_parts, and the rules loaded",
            queries=(
                Query(
                    f"{_MEAN} / on ({', '.join(RUN)}) group_left () "
                    f"({aggregated(_MEAN, 'sum')} > 0)",
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
            "a rank spends 10 % more time than the mean of the ranks, over the time range: it is "
            "slow there, and the others wait for it in backward.",
            width=12,
            unit="percentunit",
            minimum=0,
            nothing="Needs measure_step_parts, and the rules loaded",
            queries=(Query(f"topk(10, {_BEYOND_MEAN})", "rank {{rank}}, {{part}}", optional=True),),
            runbooks=(RANK_STRAGGLER,),
        ),
        Panel(
            id=14,
            title="Longest without a step",
            description="Time since the last step: the longest of all live ranks, and the ten "
            "ranks with the longest within the time range, of those without a step for two "
            "minutes. All rise together in an evaluation or a checkpoint; a rank that rises alone "
            "is stuck.",
            width=24,
            unit="s",
            minimum=0,
            nothing=f"No rank is alive{_OR_NO_RULES}",
            queries=(
                Query(
                    worst_of(recorded(f"run_rank:{_AGE}"), 10, keep=_RANK),
                    "rank {{rank}}",
                    optional=True,
                ),
                Query(f"max({recorded(f'run:{_AGE}')})", "longest", optional=True),
            ),
            runbooks=(RANK_STALLED,),
        ),
    ),
)
