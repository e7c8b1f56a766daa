"""Examples of MpAgentFp8Saturation."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_NAMED = (
    "In 2 layer(s) of run demo, a tensor used more than <fp8_range_used_high> times FP8's range, "
    "or less than <fp8_range_used_low> of it, in each of the last <fp8_scaling_samples> samples."
)

_OUTGROWN = Example(
    title="tensors that outgrow the amax that their scales are computed from",
    minutes=46,
    tracks=(
        Track(metrics.LAYERS_FP8_MISSCALED, (*flat(0, 10), *flat(2, 20), 0)),
        Track(
            metrics.FP8_MISSCALED_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "layers.3.mlp.fc1", "reason": "saturated"},
        ),
    ),
    fires={Severity.WARNING: f"{_NAMED} Among them: layer layers.3.mlp.fc1, reason saturated."},
    at=29,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="wrong scales for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(metrics.LAYERS_FP8_MISSCALED, (*flat(0, 10), *flat(2, 20), 0)),),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_FOLLOWING = Example(
    title="a single saturation, which the scale follows",
    minutes=15,
    tracks=(
        Track("mp_agent_fp8_range_used_max", (*flat(1, 5), 30, 1)),
        Track("mp_agent_fp8_saturated_ratio", (*flat(0, 5), 0.5, 0)),
        Track(metrics.LAYERS_FP8_MISSCALED, (0,)),
    ),
)

_DYNAMIC = Example(
    title="dynamic scaling, a model that is not in FP8, or nothing measured",
    minutes=15,
    without=(metrics.LAYERS_FP8_MISSCALED,),
)

EXAMPLES = {
    "MpAgentFp8Saturation": Examples(
        firing=(_OUTGROWN, _OUTLASTED),
        quiet=(_FOLLOWING, _DYNAMIC),
    ),
}
