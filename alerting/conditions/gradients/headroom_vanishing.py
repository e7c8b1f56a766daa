"""MpAgentHeadroomVanishing."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, all_of
from mp_agent.alerting.expressions.signals import Series, Where, limit
from mp_agent.alerting.remedies import FP16, Remedy
from mp_agent.alerting.severity import Severity

_IN_FORCE = {"scale": "in_force"}
_FLUSHED = Series(metric=metrics.GRAD_FP16_FLUSHED, where=(Where("scale", "=", "in_force"),))
_HEADROOM = Series(metric=metrics.GRAD_FP16_HEADROOM, aggregate="min")

_BOTH = Example(
    title="small gradients are lost while the largest are at the limit",
    minutes=25,
    tracks=(
        Track(metrics.GRAD_FP16_FLUSHED, (*flat(0, 5), 0.12), _IN_FORCE),
        Track(metrics.GRAD_FP16_HEADROOM, (*flat(4, 5), 0.6)),
    ),
    fires={
        Severity.INFO: "No loss scale suits run demo any more: 12% of the gradients are lost "
        "below FP16's smallest number, and the next doubling of the scale overflows."
    },
    at=20,
    not_yet=(7,),
)

_LOW_SCALE = Example(
    title="a scale that can still grow",
    minutes=20,
    tracks=(
        Track(metrics.GRAD_FP16_FLUSHED, (0.12,), _IN_FORCE),
        Track(metrics.GRAD_FP16_HEADROOM, (6,)),
    ),
)

_HIGH_SCALE = Example(
    title="a scale at its upper limit that loses next to nothing",
    minutes=20,
    tracks=(
        Track(metrics.GRAD_FP16_FLUSHED, (0.01,), _IN_FORCE),
        Track(metrics.GRAD_FP16_HEADROOM, (0.6,)),
    ),
)

_SHORT = Example(
    title="a few unusual samples",
    minutes=20,
    tracks=(
        Track(metrics.GRAD_FP16_FLUSHED, (*flat(0.12, 4), 0.01), _IN_FORCE),
        Track(metrics.GRAD_FP16_HEADROOM, (0.6,)),
    ),
)

HEADROOM_VANISHING = Condition(
    name="MpAgentHeadroomVanishing",
    summary="The gradients no longer fit into FP16's range at any loss scale.",
    meaning="Gradients lie too far apart: a larger loss scale overflows in the largest ones, and "
    "the present one already loses part of the smallest. The scale will fall, and more will be "
    "lost.",
    confirm="mp_agent_grad_fp16_flushed_ratio at the three scales, mp_agent_grad_fp16_headroom and "
    "mp_agent_grad_exponent_elements, which shows both ends.",
    remedies=(
        Remedy("Train in BF16, which has the exponent range of FP32.", FP16),
        "Find the layer with the largest gradients and normalize its inputs, or clip them there.",
        "Keep the layers with the smallest gradients in FP32.",
    ),
    why="The scale moves all gradients together: only a smaller distance between the largest and "
    "the smallest, or a format with more exponents, makes both fit. Judged only if the setting "
    "measure_distribution is on.",
    levels=(
        Level(
            severity=Severity.INFO,
            when=all_of(
                Compare(_FLUSHED, ">", limit("fp16_flushed")),
                Compare(_HEADROOM, "<", limit("fp16_headroom_bits")),
            ),
            hold=duration("headroom_hold"),
            description="No loss scale suits run {run} any more: {value|percent} of the gradients "
            "are lost below FP16's smallest number, and the next doubling of the scale overflows.",
            reason="The delay covers several samples, because a single batch can be unusual.",
        ),
    ),
    firing=(_BOTH,),
    quiet=(_LOW_SCALE, _HIGH_SCALE, _SHORT),
)
