"""Tensors that the training script watches."""

from grafana.panel import Panel, Query, Row, above, help_of
from grafana.queries import by_run
from mp_agent.alerting.conditions.tensors import DIMENSION_IMBALANCE, REDUCTION_SWALLOWS

_NOTHING = "Nothing is watched"

TENSORS = Row(
    title="Watched tensors",
    panels=(
        Panel(
            id=90,
            title="Range of watched tensors",
            description=help_of("mp_agent_tensor_slice_imbalance")
            + " Measured of tensors that the script gives to mp_agent.watch_tensor with a "
            "dimension; above <dimension_imbalance> 16 bits keep little of the smaller slices.",
            log_base=10,
            many_decades=True,
            nothing=_NOTHING,
            queries=(
                Query(
                    by_run("mp_agent_tensor_slice_imbalance", keep=("tensor",)),
                    "{{tensor}}",
                    optional=True,
                ),
            ),
            steps=above(dimension_imbalance="orange"),
            lines=True,
            runbooks=(DIMENSION_IMBALANCE,),
        ),
        Panel(
            id=91,
            title="Terms lost in sums",
            description=help_of("mp_agent_tensor_swallowed_ratio")
            + " What the script sums in 16 bits, and watches with reduction=True, is to stay below "
            "<reduction_swallowed>.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            nothing=_NOTHING,
            queries=(
                Query(
                    by_run("mp_agent_tensor_swallowed_ratio", keep=("tensor",)),
                    "{{tensor}}",
                    optional=True,
                ),
            ),
            runbooks=(REDUCTION_SWALLOWS,),
        ),
    ),
)
