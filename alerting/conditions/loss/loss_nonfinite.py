"""MpAgentLossNonFinite."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import FIRST_NONFINITE, happened
from mp_agent.alerting.conditions.nonfinite import NONFINITE_REMEDIES, WHY_NONFINITE_ENDS
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Count
from mp_agent.alerting.first_line.triage import NO_NAN_COUNTED, UPDATED, Triage
from mp_agent.alerting.severity import Severity

_WINDOW = duration("incident_window")
_STEPS = Count(metric=metrics.LOSS_NONFINITE_UNSKIPPED, window=_WINDOW) + Count(
    metric=metrics.LOSS_NONFINITE_REPEATED, window=_WINDOW
)
"""Those on which the weights were updated, and those that skipping does not end."""


def _fires(steps: int) -> str:
    return f"The loss of run demo was NaN or Inf on {steps} recent step(s)."


_ONE_UNSKIPPED = Example(
    title="one NaN loss on a step that was not skipped",
    minutes=26,
    tracks=(
        Track(metrics.LOSS_NONFINITE_STEPS, (*flat(0, 10), 1)),
        Track(metrics.LOSS_NONFINITE_UNSKIPPED, (*flat(0, 10), 1)),
    ),
    fires={Severity.CRITICAL: _fires(1)},
    at=12,
    not_yet=(9, 25),
)

_BORN = Example(
    title="NaN losses before the first scrape",
    age_minutes=0,
    minutes=16,
    tracks=(
        Track(metrics.LOSS_NONFINITE_STEPS, (None, None, 5)),
        Track(metrics.LOSS_NONFINITE_UNSKIPPED, (None, None, 5)),
    ),
    fires={Severity.CRITICAL: _fires(5)},
    at=2,
    not_yet=(1, 15),
)

_THREE_SKIPPED = Example(
    title="the third consecutive skipped step with an Inf loss",
    minutes=26,
    tracks=(
        Track(metrics.LOSS_NONFINITE_STEPS, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(metrics.LOSS_NONFINITE_REPEATED, (*flat(0, 12), 1)),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 32768, 16384, 8192, 16384)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 10), *ramp(1, 1, 3))),
    ),
    fires={Severity.CRITICAL: _fires(1)},
    at=13,
    not_yet=(11, 25),
)

_ONE_IN_CALIBRATION = Example(
    title="one overflowed forward pass during calibration",
    minutes=20,
    tracks=(
        Track(metrics.LOSS_NONFINITE_STEPS, (0, 0, 1)),
        Track(metrics.SKIPPED_STEPS, (0, 1, 2)),
        Track(metrics.LOSS_SCALE, (65536, 32768, 16384)),
        Track(metrics.LOSS_SCALE_DECREASES, (0, 1, 2)),
        Track(metrics.STEP, ramp(0, 20, 21)),
        Track(metrics.STEPS, ramp(0, 20, 21)),
    ),
)

_HEALTHY_SKIPS = Example(
    title="overflows whose loss was finite",
    minutes=20,
    tracks=(Track(metrics.SKIPPED_STEPS, (*flat(0, 10), 1, 2)),),
)

LOSS_NONFINITE = Condition(
    name="MpAgentLossNonFinite",
    summary="The loss is NaN or Inf.",
    meaning="The forward pass produces values that no update can use; unless the steps are "
    "skipped, the weights are lost.",
    confirm="mp_agent_rank_loss_nonfinite_steps_total shows the affected ranks; a single rank "
    "indicates its data or hardware.",
    remedies=NONFINITE_REMEDIES,
    why=WHY_NONFINITE_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights=NO_NAN_COUNTED,
                now="save a checkpoint, and find the operation before an update has its result",
                updated=UPDATED,
            ),
            when=happened(_STEPS),
            description="The loss of run {run} was NaN or Inf on "
            "{value|count} recent step(s)." + FIRST_NONFINITE,
            reason="No delay: each such step matters and is counted; the first two of "
            "consecutive skipped steps are not.",
        ),
    ),
    firing=(_ONE_UNSKIPPED, _BORN, _THREE_SKIPPED),
    quiet=(_ONE_IN_CALIBRATION, _HEALTHY_SKIPS),
)
