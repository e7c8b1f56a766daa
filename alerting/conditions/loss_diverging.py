"""MpAgentLossDiverging."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples import Example, Track, flat, ramp
from mp_agent.alerting.predicates import Compare, unless
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Series, limit

_HOLD = duration("diverging_hold")
_TREND = Series(metric=metrics.LOSS_TREND)

_RISING = Example(
    title="a loss that rises from one long window to the next; the alert outlasts its end",
    minutes=51,
    tracks=(Track(metrics.LOSS_TREND, (*flat(-0.4, 10), *flat(5.5, 21), 0)),),
    fires={
        Severity.WARNING: "The loss of run demo has risen by 5.5 deviations from one long window "
        "to the next."
    },
    at=35,
    not_yet=(13, 50),
)

_FALLING = Example(
    title="a loss that falls", minutes=20, tracks=(Track(metrics.LOSS_TREND, (-8,)),)
)

_WAVES = Example(
    title="a loss that goes up and down in slow waves",
    minutes=20,
    tracks=(Track(metrics.LOSS_TREND, (2.5, 0.5, -1.5, 0.3) * 5),),
)

_TOUCHES = Example(
    title="a trend that only touches the limit",
    minutes=30,
    tracks=(Track(metrics.LOSS_TREND, (*flat(1, 20), *flat(3.4, 4), 1)),),
)

_YOUNG = Example(
    title="a run that has no two long windows yet", minutes=20, without=(metrics.LOSS_TREND,)
)

_HUNG = Example(
    title="a run that hung as soon as its trend was above the limit",
    minutes=18,
    tracks=(
        Track(metrics.LOSS_TREND, (*flat(1, 9), 3.4)),
        Track(metrics.STEP, ramp(5000, 60, 10)),
        Track(metrics.STEPS, ramp(5000, 60, 10)),
    ),
)

LOSS_DIVERGING = Condition(
    name="MpAgentLossDiverging",
    summary="The loss is rising.",
    meaning="The run unlearns: whatever it does now makes the model worse, and what it costs is "
    "lost.",
    confirm="Plot mp_agent_loss_median over the last hours, with mp_agent_learning_rate and "
    "mp_agent_grad_norm beside it; look for what changed when it turned.",
    remedies=(
        "Resume from a checkpoint from before the loss turned, with a learning rate of a third to "
        "a tenth.",
        "Check what changed at that step: schedule, data mixture, batch size, a resumed optimizer "
        "without its state.",
        "If the loss scale fell or gradients grew at the same time, treat those first.",
    ),
    why="A loss that rises for a thousand steps does not come back by itself: the weights have "
    "left the region where the learning rate is small enough.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(Compare(_TREND, ">", limit("loss_trend_deviations")), standing(_HOLD)),
            hold=_HOLD,
            keep=duration("diverging_keep"),
            description="The loss of run {run} has risen by {value|number} deviations from one "
            "long window to the next.",
            reason="The windows are long; the wait only lets the trend leave the limit, and the "
            "alert outlasts its coming back to it.",
        ),
    ),
    firing=(_RISING,),
    quiet=(_FALLING, _WAVES, _TOUCHES, _YOUNG, _HUNG),
)
