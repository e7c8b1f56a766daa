"""MpAgentGradientNonFinite."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import FIRST_NONFINITE, happened
from mp_agent.alerting.conditions.nonfinite import NONFINITE_REMEDIES, WHY_NONFINITE_ENDS
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare
from mp_agent.alerting.expressions.signals import Count, limit
from mp_agent.alerting.first_line.triage import UPDATED, Triage
from mp_agent.alerting.severity import Severity

_STEPS = Count(metric=metrics.GRAD_NONFINITE_REPEATED, window=duration("incident_window"))

_REPLACED = Count(metric=metrics.GRAD_NONFINITE_REPLACED, window=duration("incident_window"))


def _fires(steps: int) -> str:
    return (
        f"The gradients of run demo were NaN or Inf on <nonfinite_gradients> consecutive steps, "
        f"and on {steps} step(s) since then within the last <incident_window>."
    )


_SKIPPED_BY_HAND = Example(
    title="a run without a scaler that skips each such step itself",
    minutes=26,
    tracks=(
        Track(metrics.GRAD_NONFINITE_REPEATED, (*flat(0, 10), *ramp(1, 1, 4))),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 10), *ramp(3, 1, 4))),
    ),
    without=(metrics.LOSS_SCALE, metrics.LOSS_SCALE_INITIAL),
    fires={Severity.CRITICAL: _fires(4)},
    at=14,
    not_yet=(9, 25),
)

_ISOLATED = Example(
    title="isolated non-finite gradients, as in many healthy runs",
    minutes=20,
    tracks=(
        Track(metrics.SKIPPED_STEPS, (*flat(0, 5), *flat(1, 5), 2)),
        Track(metrics.GRAD_FINITE, (*flat(1, 5), 0, *flat(1, 4), 0, 1)),
    ),
)

_NAN_TO_NUM = Example(
    title="a script that replaces NaN by 0 in the gradients before each update",
    minutes=26,
    tracks=(Track(metrics.GRAD_NONFINITE_REPLACED, (*flat(0, 10), *ramp(1, 1, 4))),),
    fires={
        Severity.WARNING: "4 update(s) of run demo within the last <incident_window> used finite "
        "gradients in place of NaN or Inf that backward had made."
    },
    at=14,
    not_yet=(9, 11, 25),
)

_REPLACED_ONCE = Example(
    title="a single update with replaced gradients",
    minutes=20,
    tracks=(Track(metrics.GRAD_NONFINITE_REPLACED, (*flat(0, 5), 1)),),
)

GRADIENT_NONFINITE = Condition(
    name="MpAgentGradientNonFinite",
    summary="Gradients are NaN or Inf repeatedly.",
    meaning="The trainer skips every step without lowering a loss scale: the weights do not "
    "change; in published runs the loss diverged hundreds of steps later. Or it replaces NaN and "
    "Inf before the update: the layers concerned then train on zeros.",
    confirm="mp_agent_grad_finite stays at 0; mp_agent_first_nonfinite_info names step, layer "
    "and, if there is evidence, rank. With measure_activations, "
    "mp_agent_activation_first_nonfinite_gradient_info names the module in whose backward it "
    "arose.",
    remedies=(
        "Stop the run, and resume from its last checkpoint once the cause is fixed.",
        *NONFINITE_REMEDIES,
    ),
    why=WHY_NONFINITE_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact so far, since the trainer skips these steps",
                now="stop, and find the operation, since no step trains the model",
                updated=UPDATED,
            ),
            when=happened(_STEPS),
            description="The gradients of run {run} were NaN or Inf on <nonfinite_gradients> "
            "consecutive steps, and on {value|count} step(s) since then within the last "
            "<incident_window>." + FIRST_NONFINITE,
            reason="No delay: the condition already requires consecutive steps. Steps on which "
            "a scaler lowers its scale are excluded, and so are updates, which "
            "MpAgentNonFiniteUpdate covers.",
        ),
        Level(
            severity=Severity.WARNING,
            when=Compare(_REPLACED, ">=", limit("nonfinite_gradients")),
            description="{value|count} update(s) of run {run} within the last <incident_window> "
            "used finite gradients in place of NaN or Inf that backward had made."
            + FIRST_NONFINITE,
            reason="No delay: the condition already requires several such steps.",
        ),
    ),
    firing=(_SKIPPED_BY_HAND, _NAN_TO_NUM),
    quiet=(_ISOLATED, _REPLACED_ONCE),
)
