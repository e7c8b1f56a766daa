"""Rank scope: each rank's own gradients, before they are reduced over the ranks."""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.columns import LOCAL_GRAD_NONFINITE_ELEMENTS, LOCAL_GRAD_NORM
from mp_agent.records.views import RankView

_OF_WHAT = (
    "the rank's own gradients of the step, as its last backward left them before they were "
    "reduced over the ranks"
)


def _norm(rank: RankView) -> Reading:
    return None if rank.values is None else rank.values.get(LOCAL_GRAD_NORM)


RANK_LOCAL_GRADIENT_METRICS = (
    Metric(
        name="mp_agent.rank.local_grad.norm",
        unit="{gradient}",
        kind=Kind.GAUGE,
        scope=Scope.RANK,
        help=f"L2 norm over the finite elements of {_OF_WHAT}, unscaled; absent where that was "
        "not measured.",
        read=_norm,
    ),
    Metric(
        name="mp_agent.rank.local_grad.nonfinite.elements",
        unit="{element}",
        kind=Kind.COUNTER,
        scope=Scope.RANK,
        help=f"NaN and Inf elements of {_OF_WHAT}; those of an overflow that GradScaler skips "
        "count, too.",
        count=lambda values: values.get(LOCAL_GRAD_NONFINITE_ELEMENTS),
        appears_when_counted=True,
    ),
)
