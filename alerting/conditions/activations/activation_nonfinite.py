"""MpAgentActivationNonFinite."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.conditions.nonfinite import NONFINITE_REMEDIES, WHY_NONFINITE_ENDS
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Count
from mp_agent.alerting.first_line.triage import NAN_WRITTEN, NO_NAN_COUNTED, ROLL_BACK, Triage
from mp_agent.alerting.severity import Severity

_ELEMENTS = Count(metric=metrics.ACTIVATION_NONFINITE, window=duration("incident_window"))

_ONE_MODULE = Example(
    title="a module returns Inf on one sampled step",
    minutes=26,
    tracks=(
        Track(metrics.ACTIVATION_NONFINITE, (*flat(0, 10), 12)),
        Track(
            metrics.FIRST_NONFINITE_OUTPUT,
            (*flat(None, 10), 1),
            {"step": "5600", "layer": "blocks.4.mlp.up"},
        ),
    ),
    fires={
        Severity.CRITICAL: "Modules of run demo returned 12 NaN or Inf element(s) on the steps "
        "that were sampled in the last <incident_window>. First at step 5600, layer "
        "blocks.4.mlp.up."
    },
    at=15,
    not_yet=(9, 25),
)

_NEAR = Example(
    title="outputs close to the largest number of FP16",
    minutes=15,
    tracks=(Track(metrics.ACTIVATION_NONFINITE, (0,)),),
)

_OFF = Example(
    title="a run that does not measure outputs",
    minutes=15,
    without=(metrics.ACTIVATION_NONFINITE,),
)

ACTIVATION_NONFINITE = Condition(
    name="MpAgentActivationNonFinite",
    summary="A module returned NaN or Inf in the forward pass.",
    meaning="The loss and all gradients behind that module become non-finite; without a scaler "
    "that skips the step, so do the weights.",
    confirm="mp_agent_activation_first_nonfinite_info names the first module of the forward pass; "
    "mp_agent_layer_activation_abs_max shows how its output grew before.",
    remedies=(
        "Run the module that is named in FP32, if its output overflows FP16.",
        *NONFINITE_REMEDIES,
    ),
    why=WHY_NONFINITE_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights=NO_NAN_COUNTED,
                now="save a checkpoint, and run the module that is named in FP32",
                updated=Triage(
                    weights=NAN_WRITTEN, now=f"{ROLL_BACK} with the module that is named in FP32"
                ),
            ),
            when=happened(_ELEMENTS),
            description="Modules of run {run} returned {value|count} NaN or Inf element(s) on the "
            "steps that were sampled in the last <incident_window>."
            "{mp_agent_activation_first_nonfinite_info| First at |step layer}",
            reason="No delay: an output that is not finite never becomes finite again behind it.",
        ),
    ),
    firing=(_ONE_MODULE,),
    quiet=(_NEAR, _OFF),
)
