"""Where ranks differ: replicas that must be equal, phases, losses."""

from grafana.panel import Panel, Query, Row, View, help_of
from grafana.queries import by_run, increase, recorded, worst_of
from grafana.style import AGREEMENT
from mp_agent.alerting.conditions.batches import RANK_LOSS_OUTLIERS, RANK_LOSS_UNLIKE
from mp_agent.alerting.conditions.nonfinite import LOSS_NONFINITE, RANK_NONFINITE
from mp_agent.alerting.conditions.ranks import REPLICA_DIVERGENCE

_PHASES = recorded("run_phase:mp_agent_rank_phase_info:count")
_OWN_NORM = "mp_agent_rank_local_grad_norm"
_OWN_NONFINITE = "mp_agent_rank_local_grad_nonfinite_elements_total"
_OFF = "measure_local_gradients is off, or the rules are not loaded"

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
            queries=(Query(f"sum by (phase) ({_PHASES})", "{{phase}}"),),
        ),
        Panel(
            id=20,
            title="Spread of the ranks' losses",
            description="Smallest, median and largest of the ranks' own losses. A single "
            "outlier indicates the rank's data or hardware.",
            width=12,
            queries=(
                Query(f"min({recorded('run:mp_agent_rank_loss:min')})", "smallest"),
                Query(f"max({recorded('run:mp_agent_rank_loss:median')})", "median"),
                Query(f"max({recorded('run:mp_agent_rank_loss:max')})", "largest"),
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
            nothing="All losses were finite, or the rules are not loaded",
            sparse=True,
            queries=(
                Query(
                    worst_of(
                        recorded("run_rank:mp_agent_rank_loss_nonfinite_steps_total:max"),
                        10,
                        keep=("rank",),
                    ),
                    "rank {{rank}}",
                    optional=True,
                ),
            ),
            runbooks=(RANK_NONFINITE, LOSS_NONFINITE),
        ),
        Panel(
            id=25,
            title="Gradient norms before the reduction",
            description=help_of(_OWN_NORM) + " The median of all ranks, and the ten ranks with "
            "the largest of those above twice the median: their data is unusual, or their hardware "
            "faulty.",
            width=12,
            nothing=_OFF,
            queries=(
                Query(
                    worst_of(recorded(f"run_rank:{_OWN_NORM}:max"), 10, keep=("rank",)),
                    "rank {{rank}}",
                    optional=True,
                ),
                Query(f"max({recorded(f'run:{_OWN_NORM}:median')})", "median", optional=True),
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
            queries=(
                Query(
                    worst_of(
                        recorded("run_rank:mp_agent_rank_local_grad_nonfinite_elements_total:max"),
                        10,
                        keep=("rank",),
                    ),
                    "rank {{rank}}",
                    optional=True,
                ),
            ),
            runbooks=(RANK_NONFINITE,),
        ),
    ),
)
