"""MpAgentLossNonFinite."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import first_nonfinite
from mp_agent.alerting.conditions.nonfinite import NONFINITE_REMEDIES, WHY_NONFINITE_ENDS
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.examples import Example, Track, flat, ramp
from mp_agent.alerting.predicates import Compare, any_of
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Count, limit

_INCIDENT, _REPEAT = duration("incident_window"), duration("repeat_window")


def _nonfinite(window: Duration) -> Count:
    return Count(metric=metrics.LOSS_NONFINITE_STEPS, window=window)


_MORE_THAN_SKIPPED = Compare(
    _nonfinite(_INCIDENT), ">", Count(metric=metrics.SKIPPED_STEPS, window=_INCIDENT)
)
"""At least one step with such a loss was not skipped."""


def _fires(steps: int) -> str:
    return f"The loss of run demo was NaN or Inf on {steps} recent step(s)."


_ONE_UNSKIPPED = Example(
    title="one NaN loss on a step that was not skipped",
    minutes=30,
    tracks=(Track(metrics.LOSS_NONFINITE_STEPS, (*flat(0, 10), 1)),),
    fires={Severity.CRITICAL: _fires(1)},
    at=12,
    not_yet=(9, 25),
)

_BORN = Example(
    title="NaN losses before the first scrape",
    minutes=20,
    tracks=(Track(metrics.LOSS_NONFINITE_STEPS, (None, None, 5)),),
    fires={Severity.CRITICAL: _fires(5)},
    at=2,
    not_yet=(1, 15),
)

_THREE_SKIPPED = Example(
    title="the third skipped step in a row with an Inf loss",
    minutes=30,
    tracks=(
        Track(metrics.LOSS_NONFINITE_STEPS, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 32768, 16384, 8192)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 10), *ramp(1, 1, 3))),
    ),
    fires={Severity.CRITICAL: _fires(3)},
    at=13,
    not_yet=(11, 25),
)

_ONE_IN_CALIBRATION = Example(
    title="one overflowed forward pass during calibration",
    minutes=30,
    tracks=(
        Track(metrics.LOSS_NONFINITE_STEPS, (0, 0, 1)),
        Track(metrics.SKIPPED_STEPS, (0, 3, 5)),
        Track(metrics.LOSS_SCALE, (65536, 8192, 2048)),
        Track(metrics.LOSS_SCALE_DECREASES, (0, 3, 5)),
        Track(metrics.STEP, ramp(0, 20, 31)),
        Track(metrics.STEPS, ramp(0, 20, 31)),
    ),
)

_HEALTHY_SKIPS = Example(
    title="overflows whose loss was finite",
    minutes=30,
    tracks=(Track(metrics.SKIPPED_STEPS, (*flat(0, 10), 1, 2)),),
)

LOSS_NONFINITE = Condition(
    name="MpAgentLossNonFinite",
    summary="The loss is NaN or Inf.",
    meaning="The forward pass produces values that no update can learn from; unless the steps are "
    "skipped, the weights are lost.",
    confirm="mp_agent_rank_loss_nonfinite_steps_total shows which ranks; one rank alone points at "
    "its data or hardware.",
    remedies=NONFINITE_REMEDIES,
    why=WHY_NONFINITE_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            when=any_of(
                _MORE_THAN_SKIPPED, Compare(_nonfinite(_REPEAT), ">=", limit("nonfinite_losses"))
            ),
            description="The loss of run {{ $labels.run }} was NaN or Inf on "
            '{{ printf "%.0f" $value }} recent step(s).' + first_nonfinite(),
        ),
    ),
    firing=(_ONE_UNSKIPPED, _BORN, _THREE_SKIPPED),
    quiet=(_ONE_IN_CALIBRATION, _HEALTHY_SKIPS),
)
