"""MpAgentRouterCollapse."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Series
from mp_agent.alerting.severity import Severity

_COLLAPSED = Series(metric=metrics.ROUTERS_COLLAPSED)
_NAMED = (
    "2 router(s) of run demo sent more than <router_load_high> times the even share to one expert, "
    "at an entropy below <router_entropy_low>, in the last <router_collapse_samples> samples."
)

_COLLAPSE = Example(
    title="routers that send most tokens to few experts",
    minutes=46,
    tracks=(
        Track(metrics.ROUTERS_COLLAPSED, (*flat(0, 10), *flat(2, 20), 0)),
        Track(
            metrics.COLLAPSED_ROUTER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "layers.3.mlp.gate"},
        ),
    ),
    fires={Severity.WARNING: f"{_NAMED} Among them: layers.3.mlp.gate."},
    at=29,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="collapsed routers for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(metrics.ROUTERS_COLLAPSED, (*flat(0, 10), *flat(2, 20), 0)),),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_EVEN = Example(
    title="routers that use all their experts",
    minutes=15,
    tracks=(Track(metrics.ROUTERS_COLLAPSED, (0,)),),
)

_OFF = Example(
    title="a run that does not measure routers",
    minutes=15,
    without=(metrics.ROUTERS_COLLAPSED,),
)

ROUTER_COLLAPSE = Condition(
    name="MpAgentRouterCollapse",
    summary="Routers send most tokens to few experts.",
    meaning="The other experts get hardly any tokens, so they learn nothing and are chosen even "
    "less. Where experts have a capacity, tokens beyond it are dropped.",
    confirm="mp_agent_layer_router_load_max, mp_agent_layer_router_entropy_ratio and "
    "mp_agent_layer_router_unused_experts_ratio of the routers that "
    "mp_agent_collapsed_router_info names.",
    remedies=(
        "Add the load-balancing loss to the loss, or raise its weight.",
        "Add a z-loss on the router's logits, and compute the router in FP32.",
        "Resume from a checkpoint from before the collapse: it does not undo itself.",
    ),
    why="The balancing loss pushes tokens towards unused experts, and a z-loss keeps logits small, "
    "so that the router can change its mind. Judged only if the setting measure_routers is on, and "
    "the router shows its logits; with N experts of which a token gets k, the load is N/k at most.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_COLLAPSED),
            keep=duration("layer_keep"),
            description="{value|count} router(s) of run {run} sent more than <router_load_high> "
            "times the even share to one expert, at an entropy below <router_entropy_low>, in the "
            "last <router_collapse_samples> samples."
            "{mp_agent_collapsed_router_info| Among them: |layer}",
            reason="No delay: the condition already requires consecutive samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    firing=(_COLLAPSE, _OUTLASTED),
    quiet=(_EVEN, _OFF),
)
