"""Examples of MpAgentLossSpike."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat


def _fires(steps: int) -> str:
    return (
        f"The loss of run demo was far above its usual level on {steps} step(s) within the last "
        f"<loss_spike_window>."
    )


_SPIKE = Example(
    title="a loss that is far above its median for some steps",
    minutes=19,
    tracks=(
        Track(metrics.LOSS_SPIKE_STEPS, (*flat(0, 10), 12)),
        Track(metrics.LOSS, (*flat(2.0, 10), 7.0, 2.1)),
    ),
    fires={Severity.WARNING: _fires(12)},
    at=12,
    not_yet=(9, 18),
)

_BORN = Example(
    title="a spike before the first scrape",
    age_minutes=0,
    minutes=12,
    tracks=(Track(metrics.LOSS_SPIKE_STEPS, (None, None, 3)),),
    fires={Severity.WARNING: _fires(3)},
    at=2,
    not_yet=(1, 10),
)

_NONFINITE = Example(
    title="a NaN loss, which never enters the window and is no spike",
    minutes=20,
    tracks=(
        Track(metrics.LOSS_NONFINITE_STEPS, (*flat(0, 10), 1)),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 10), 1)),
    ),
)

_ODD_BATCH = Example(
    title="a single batch with twice the loss, which is not counted",
    minutes=20,
    tracks=(Track(metrics.LOSS, (*flat(2.0, 10), 4.0, 2.0)),),
)

_OTHER_LEVEL = Example(
    title="a loss that fluctuates within its own deviations",
    minutes=20,
    tracks=(Track(metrics.LOSS, (1.0, 3.0) * 10),),
)

EXAMPLES = {
    "MpAgentLossSpike": Examples(
        firing=(_SPIKE, _BORN),
        quiet=(_NONFINITE, _ODD_BATCH, _OTHER_LEVEL),
    ),
}
