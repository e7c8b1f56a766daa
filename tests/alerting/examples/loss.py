"""Examples of alerts on the loss and the learning rate."""

from mp_agent.alerting.conditions.loss import _LOST_TEXT
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import run, training
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp


def _fires(steps: int) -> str:
    return (
        f"The loss of run demo was far above its usual level on {steps} step(s) within the last "
        f"<loss_spike_window>."
    )


_SPIKE = Example(
    title="a loss that is far above its median for some steps",
    minutes=19,
    tracks=(
        Track(training.LOSS_SPIKE_STEPS, (*flat(0, 10), 12)),
        Track(run.LOSS, (*flat(2.0, 10), 7.0, 2.1)),
    ),
    fires={Severity.WARNING: _fires(12)},
    at=12,
    not_yet=(9, 18),
)

_BORN = Example(
    title="a spike before the first scrape",
    age_minutes=0,
    minutes=12,
    tracks=(Track(training.LOSS_SPIKE_STEPS, (None, None, 3)),),
    fires={Severity.WARNING: _fires(3)},
    at=2,
    not_yet=(1, 10),
)

_NONFINITE = Example(
    title="a NaN loss, which never enters the window and is no spike",
    minutes=20,
    tracks=(
        Track(run.LOSS_NONFINITE_STEPS, (*flat(0, 10), 1)),
        Track(training.SKIPPED_STEPS, (*flat(0, 10), 1)),
    ),
)

_ODD_BATCH = Example(
    title="a single batch with twice the loss, which is not counted",
    minutes=20,
    tracks=(Track(run.LOSS, (*flat(2.0, 10), 4.0, 2.0)),),
)

_OTHER_LEVEL = Example(
    title="a loss that fluctuates within its own deviations",
    minutes=20,
    tracks=(Track(run.LOSS, (1.0, 3.0) * 10),),
)


_RISEN = Example(
    title="a loss that rises from one long window to the next; the alert lasts longer",
    minutes=51,
    tracks=(
        Track(training.LOSS_TREND, (*flat(-0.4, 10), *flat(5.5, 21), 0)),
        Track(training.LOSS_RISING_STEPS, (*flat(0, 10), *ramp(60, 60, 21), 0)),
    ),
    fires={
        Severity.WARNING: "The loss of run demo has risen by 5.5 deviations from one long window "
        "to the next."
    },
    at=35,
    not_yet=(10, 50),
)

_THROWN_BACK = Example(
    title="a run that an explosion set back permanently, at many steps a second",
    minutes=60,
    tracks=(
        Track(run.LOSS, (*flat(2.6, 10), 300.0)),
        Track(training.LOSS_TREND, (*flat(-0.4, 10), 900.0, 0)),
        Track(training.LOSS_LOST_STEPS, (*flat(0, 11), *ramp(600, 600, 50))),
    ),
    fires={
        Severity.CRITICAL: _LOST_TEXT.replace("{run}", "demo").replace("{value|count}", "29400")
    },
    at=59,
    not_yet=(10,),
)

_RECOVERED = Example(
    title="a run that was set back and has recovered; the alert lasts longer",
    minutes=40,
    tracks=(Track(training.LOSS_LOST_STEPS, (*flat(0, 5), *ramp(60, 60, 10), 0)),),
    fires={Severity.CRITICAL: _LOST_TEXT.replace("{run}", "demo").replace("{value|count}", "600")},
    at=18,
    not_yet=(4, 36),
)

_FALLING = Example(
    title="a loss that falls", minutes=20, tracks=(Track(training.LOSS_TREND, (-8,)),)
)

_WAVES = Example(
    title="a loss that oscillates slowly",
    minutes=20,
    tracks=(Track(training.LOSS_TREND, (2.5, 0.5, -1.5, 0.3) * 5),),
)

_TOUCHES = Example(
    title="a trend that only touches the limit, with slow steps",
    minutes=30,
    tracks=(
        Track(training.LOSS_TREND, (*flat(1, 10), *flat(3.4, 14), 1)),
        Track(training.LOSS_RISING_STEPS, (*flat(0, 10), *ramp(4, 4, 14), 0)),
    ),
)

_YOUNG = Example(
    title="a run that does not have two long windows yet",
    minutes=20,
    without=(training.LOSS_TREND,),
)


_JUMP = Example(
    title="a learning rate that suddenly grows three thousandfold",
    minutes=26,
    tracks=(Track(training.LEARNING_RATE_JUMPS, (*flat(0, 10), 1)),),
    fires={
        Severity.WARNING: "The learning rate of run demo rose to <learning_rate_jump> times its "
        "highest value so far, or more, within the last <incident_window>."
    },
    at=12,
    not_yet=(9, 25),
)

_WARM_UP = Example(
    title="a warm-up, whose rises are not counted",
    minutes=12,
    tracks=(Track(training.LEARNING_RATE_JUMPS, (0,)),),
)

_FALL = Example(
    title="a schedule for epochs that is stepped at every batch",
    minutes=26,
    tracks=(Track(training.LEARNING_RATE_FALLS, (*flat(0, 10), 1)),),
    fires={
        Severity.WARNING: "The learning rate of run demo has fallen, within 64 steps, to less than "
        "<learning_rate_fall> of what it was, and the run goes on."
    },
    at=12,
    not_yet=(9, 25),
)

_DECAY = Example(
    title="a schedule that ends with the run",
    minutes=12,
    tracks=(Track(training.LEARNING_RATE_FALLS, (0,)),),
)


EXAMPLES = {
    "MpAgentLossSpike": Examples(
        firing=(_SPIKE, _BORN),
        quiet=(_NONFINITE, _ODD_BATCH, _OTHER_LEVEL),
    ),
    "MpAgentLossDiverging": Examples(
        firing=(_RISEN, _THROWN_BACK, _RECOVERED),
        quiet=(_FALLING, _WAVES, _TOUCHES, _YOUNG),
    ),
    "MpAgentLearningRateJump": Examples(
        firing=(_JUMP,),
        quiet=(_WARM_UP,),
    ),
    "MpAgentLearningRateFallen": Examples(firing=(_FALL,), quiet=(_DECAY,)),
}
