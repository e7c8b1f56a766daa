"""MpAgentActivationNearOverflow."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Count
from mp_agent.alerting.severity import Severity

_ELEMENTS = Count(metric=metrics.ACTIVATION_NEAR_OVERFLOW, window=duration("incident_window"))

_SOME = Example(
    title="some elements close to the largest number of FP16, on one sampled step",
    minutes=26,
    tracks=(Track(metrics.ACTIVATION_NEAR_OVERFLOW, (*flat(0, 10), 7)),),
    fires={
        Severity.WARNING: "7 element(s) of FP16 outputs of run demo were above "
        "<fp16_near_overflow> on the steps that were sampled in the last <incident_window>."
    },
    at=15,
    not_yet=(9, 25),
)

_BFLOAT16 = Example(
    title="larger outputs in BF16 or FP32, which are not counted",
    minutes=15,
    tracks=(Track(metrics.ACTIVATION_NEAR_OVERFLOW, (0,)),),
)

_OFF = Example(
    title="a run that does not measure outputs",
    minutes=15,
    without=(metrics.ACTIVATION_NEAR_OVERFLOW,),
)

ACTIVATION_NEAR_OVERFLOW = Condition(
    name="MpAgentActivationNearOverflow",
    summary="FP16 outputs of modules are close to overflow.",
    meaning="FP16 ends at 65 504: a little more, and the output is Inf and the step is lost.",
    confirm="mp_agent_layer_activation_abs_max shows which modules have the largest outputs, and "
    "since when.",
    remedies=(
        "Run the modules with the largest outputs in FP32, or the whole model in BF16.",
        "Normalize before them, or lower the learning rate if their outputs keep growing.",
    ),
    why="The loss scale does not help: it multiplies gradients and not the outputs of the forward "
    "pass. FP32 and BF16 reach to 3e38.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_ELEMENTS),
            description="{value|count} element(s) of FP16 outputs of run {run} were above "
            "<fp16_near_overflow> on the steps that were sampled in the last <incident_window>.",
            reason="No delay: samples are far apart, and the next step may overflow.",
        ),
    ),
    firing=(_SOME,),
    quiet=(_BFLOAT16, _OFF),
)
