"""Examples of MpAgentRouterCollapse."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

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

EXAMPLES = {
    "MpAgentRouterCollapse": Examples(
        firing=(_COLLAPSE, _OUTLASTED),
        quiet=(_EVEN, _OFF),
    ),
}
