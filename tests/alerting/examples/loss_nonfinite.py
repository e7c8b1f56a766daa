"""Examples of MpAgentLossNonFinite."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp


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

EXAMPLES = {
    "MpAgentLossNonFinite": Examples(
        firing=(_ONE_UNSKIPPED, _BORN, _THREE_SKIPPED),
        quiet=(_ONE_IN_CALIBRATION, _HEALTHY_SKIPS),
    ),
}
