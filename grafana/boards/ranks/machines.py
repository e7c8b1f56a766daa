"""Below the ranks: the agent of each node, and the GPUs as dcgm-exporter sees them."""

from grafana.panel import Column, Panel, Query, Row, View
from grafana.queries import RUN, by_run, chosen, recorded, series
from grafana.style import ANY_IS_NOTABLE
from mp_agent.alerting.conditions.agent import TELEMETRY_DEGRADED
from mp_agent.alerting.rules import AGENT_TROUBLES

_NODE = ("node_rank",)
_NODES_SHOWN = 20

_TROUBLES = (
    *("Probe errors", "Setting errors", "Dropped records", "Dropped series", "Failed pushes"),
    "Reports given up",
)
"""Titles of the columns of what a node agent counts of its own troubles."""

_WORST = (
    f"{recorded('run_node:mp_agent_troubles:sum')} "
    f"or topk({_NODES_SHOWN}, {by_run('mp_agent_build_info', keep=_NODE)})"
)


def _of_the_worst(expression: str) -> Query:
    return Query(chosen(expression, f"({_WORST})", keep=_NODE), instant=True)


_SINCE_PUSH = (
    f"time() - {by_run('mp_agent_push_last_success_timestamp_seconds', keep=_NODE)} "
    f"and on ({', '.join(RUN)}) ({by_run('mp_agent_run_active')} == 1)"
)

AGENTS = Row(
    title="Node agents",
    panels=(
        Panel(
            id=40,
            title="Node agents",
            description="The agents with the most problems, as the rules have recorded them, ten "
            f"at most, and {_NODES_SHOWN} others. Counts are since the agent started. The root "
            "agent, at rank 0, does not push. See the Telemetry dashboard for details.",
            view=View.TABLE,
            width=24,
            height=8,
            nothing="No node agent",
            sort_by=("Probe errors",),
            columns=(
                Column(name="node_rank", title="Node", width=80, number=True),
                Column(name="instance", title="Instance"),
                Column(name="version", title="Version", width=110),
                *(
                    Column(
                        name=f"Value #{letter}",
                        title=title,
                        unit="none",
                        width=150,
                        steps=ANY_IS_NOTABLE,
                    )
                    for letter, title in zip("BCDEFG", _TROUBLES, strict=True)
                ),
                Column(name="Value #H", title="Since a push", unit="s", width=120),
            ),
            queries=(
                _of_the_worst(
                    by_run("mp_agent_build_info", keep=("node_rank", "instance", "version"))
                ),
                *(_of_the_worst(by_run(name, keep=_NODE)) for name in AGENT_TROUBLES),
                Query(
                    chosen(f"({_SINCE_PUSH})", f"({_WORST})", keep=_NODE),
                    instant=True,
                    optional=True,
                ),
            ),
            runbooks=(TELEMETRY_DEGRADED,),
        ),
    ),
)

_KNOWN = series("mp_agent_rank_info", 'gpu_uuid!=""')
# torch gives the UUID without the prefix that DCGM writes.
_BY_UUID = f'label_replace({_KNOWN}, "UUID", "GPU-$1", "gpu_uuid", "(?:GPU-)?(.+)")'
_RANK_OF_GPU = f"max by (UUID, rank) ({_BY_UUID})"


_GPU_POINTS = 60
"""Every one looks at all ranks."""


def _of_gpus(number: int, title: str, description: str, metric: str, unit: str) -> Panel:
    """Return a graph of a series of dcgm-exporter for the run's GPUs, the ten largest by rank."""
    # Ranks may share a GPU, so that the side of the ranks is the one of many.
    by_rank = f"max by (UUID) ({metric}) * on (UUID) group_right {_RANK_OF_GPU}"
    return Panel(
        id=number,
        title=title,
        description=f"{description} From dcgm-exporter, joined by UUID.",
        unit=unit,
        nothing="No GPU of this run in dcgm-exporter's series",
        most_points=_GPU_POINTS,
        queries=(Query(f"topk(10, {by_rank})", "rank {{rank}}", optional=True),),
    )


GPUS = Row(
    title="GPU (dcgm-exporter)",
    collapsed=True,
    panels=(
        _of_gpus(
            30,
            "Hottest GPUs",
            "Temperature of the ten hottest GPUs of the run.",
            "DCGM_FI_DEV_GPU_TEMP",
            "celsius",
        ),
        _of_gpus(
            31,
            "Power of the GPUs",
            "Power draw of the run's GPUs, the ten highest.",
            "DCGM_FI_DEV_POWER_USAGE",
            "watt",
        ),
        _of_gpus(
            32,
            "XID errors",
            "Last XID error of the run's GPUs; 0 means none. An error on the rank of the first "
            "non-finite value indicates the hardware.",
            "DCGM_FI_DEV_XID_ERRORS",
            "none",
        ),
    ),
)
