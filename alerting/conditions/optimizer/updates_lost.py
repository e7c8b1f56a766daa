"""MpAgentUpdatesLost."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.severity import Severity

_LOST = Series(metric=metrics.UPDATES_LOST)

_MOST = Example(
    title="most updates of BF16 weights are rounded away",
    minutes=20,
    tracks=(Track(metrics.UPDATES_LOST, (*flat(0.2, 5), 0.8)),),
    fires={
        Severity.WARNING: "80% of the updates of 16-bit weights in run demo do not change the "
        "weight: they are smaller than half the spacing of its format."
    },
    at=15,
    not_yet=(6,),
)

_SOME = Example(
    title="BF16 weights with stochastic data: half of the updates arrive",
    minutes=20,
    tracks=(Track(metrics.UPDATES_LOST, (0.45,)),),
)

_SHORT = Example(
    title="a warm-up that begins with tiny learning rates",
    minutes=20,
    tracks=(Track(metrics.UPDATES_LOST, (*flat(0.9, 4), 0.3)),),
)

UPDATES_LOST = Condition(
    name="MpAgentUpdatesLost",
    summary="Most updates of 16-bit weights vanish in rounding.",
    meaning="A weight in BF16 keeps 8 significant bits, in FP16 11: an update of less than about "
    "a 500th, or a 4000th, of the weight leaves it as it was. Learning slows down and stops "
    "as the learning rate decays, although gradients look healthy.",
    confirm="mp_agent_updates_lost_ratio, and mp_agent_layer_updates_lost_ratio by layer; "
    "mp_agent_update_relative shows how small the updates are.",
    remedies=(
        "Keep the weights that the optimizer steps in FP32 (master weights) and compute in 16 "
        "bits by autocast, or by FSDP's MixedPrecisionPolicy.",
        "Round stochastically, or carry the rounding error along (Kahan summation), where memory "
        "does not allow FP32 weights.",
    ),
    why="FP32 weights keep 24 significant bits, so that small updates add up instead of being "
    "lost one by one. Judged only if the setting measure_updates is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(_LOST, ">", limit("updates_lost")),
            hold=duration("update_hold"),
            description="{value|percent} of the updates of 16-bit weights in run {run} do not "
            "change the weight: they are smaller than half the spacing of its format.",
            reason="The delay covers several samples, and the first steps of a warm-up.",
        ),
    ),
    firing=(_MOST,),
    quiet=(_SOME, _SHORT),
)
