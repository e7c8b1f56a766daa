"""Where ranks differ: replicas that must be equal, phases, losses."""

from grafana.panel import Panel, Query, Row, View, help_of
from grafana.queries import by_run, increase, series, worst_over_range
from grafana.style import AGREEMENT
from mp_agent.alerting.conditions.batches import RANK_LOSS_OUTLIERS, RANK_LOSS_UNLIKE
from mp_agent.alerting.conditions.nonfinite import LOSS_NONFINITE, RANK_NONFINITE
from mp_agent.alerting.conditions.ranks import REPLICA_DIVERGENCE

_POINTS = 100
"""Enough for a picture; every one looks at all ranks."""
_PHASES = by_run("mp_agent_rank_phase_info", keep=("rank", "phase"))
_LOSS = series("mp_agent_rank_loss")
_OWN_NORM = "mp_agent_rank_local_grad_norm"
_OWN_NONFINITE = "mp_agent_rank_local_grad_nonfinite_elements_total"
_OFF = "measure_local_gradients is off"

DIFFERENCES = Row(
    title="Differences",
    panels=(
        Panel(
            id=23,
            title="Replicas",
            description=help_of("mp_agent_replica_divergence"),
            view=View.TIMELINE,
            width=8,
            height=6,
            nothing="Nothing to compare",
            texts=AGREEMENT,
            queries=(
                Query(
                    by_run("mp_agent_replica_divergence", keep=("kind",)), "{{kind}}", optional=True
                ),
            ),
            runbooks=(REPLICA_DIVERGENCE,),
        ),
        Panel(
            id=24,
            title="Steps on which replicas differed",
            description=help_of("mp_agent_replica_divergence_steps_total") + " A single one is "
            "a problem.",
            width=8,
            height=6,
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(
                    increase("mp_agent_replica_divergence_steps_total", keep=("kind",)), "{{kind}}"
                ),
            ),
            runbooks=(REPLICA_DIVERGENCE,),
        ),
        Panel(
            id=22,
            title="Ranks by phase",
            description="Number of ranks in each phase. A few ranks that stay in a different "
            "phase are stuck.",
            width=8,
            height=6,
            minimum=0,
            decimals=0,
            most_points=_POINTS,
            queries=(Query(f"count by (phase) ({_PHASES})", "{{phase}}"),),
        ),
        Panel(
            id=20,
            title="Spread of the ranks' losses",
            description="Smallest, median and largest of the ranks' own losses. A single "
            "outlier indicates the rank's data or hardware.",
            width=12,
            most_points=_POINTS,
            queries=(
                Query(f"min({_LOSS})", "smallest"),
                Query(f"quantile(0.5, {_LOSS})", "median"),
                Query(f"max({_LOSS})", "largest"),
            ),
            runbooks=(RANK_LOSS_OUTLIERS, RANK_LOSS_UNLIKE),
        ),
        Panel(
            id=21,
            title="Ranks with a non-finite loss",
            description=help_of("mp_agent_rank_loss_nonfinite_steps_total")
            + " The ten ranks with the most.",
            width=12,
            minimum=0,
            nothing="All losses were finite",
            sparse=True,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range("mp_agent_rank_loss_nonfinite_steps_total", 10, keep=("rank",))
                    + " > 0",
                    "rank {{rank}}",
                    optional=True,
                ),
            ),
            runbooks=(RANK_NONFINITE, LOSS_NONFINITE),
        ),
        Panel(
            id=25,
            title="Gradient norms before the reduction",
            description=help_of(_OWN_NORM) + " The ten ranks with the largest, and the median of "
            "all: a rank far from it has unusual data or faulty hardware.",
            width=12,
            nothing=_OFF,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range(_OWN_NORM, 10, keep=("rank",)), "rank {{rank}}", optional=True
                ),
                Query(f"quantile(0.5, {series(_OWN_NORM)})", "median", optional=True),
            ),
            runbooks=(RANK_NONFINITE,),
        ),
        Panel(
            id=26,
            title="NaN and Inf before the reduction",
            description=help_of(_OWN_NONFINITE) + " The ten ranks with the most.",
            width=12,
            minimum=0,
            nothing=f"All were finite, or {_OFF}",
            sparse=True,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range(_OWN_NONFINITE, 10, keep=("rank",)) + " > 0",
                    "rank {{rank}}",
                    optional=True,
                ),
            ),
            runbooks=(RANK_NONFINITE,),
        ),
    ),
)
