"""MpAgentLossDiverging."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, all_of
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.first_line.triage import Triage
from mp_agent.alerting.severity import Severity

_TREND = Series(metric=metrics.LOSS_TREND)
_RISING = Series(metric=metrics.LOSS_RISING_STEPS)
_LOST = Series(metric=metrics.LOSS_LOST_STEPS)
_LOST_TEXT = (
    "Run {run} has lost what it had learned: the loss has been far above its best level for "
    "{value|count} steps."
)

_RISEN = Example(
    title="a loss that rises from one long window to the next; the alert lasts longer",
    minutes=51,
    tracks=(
        Track(metrics.LOSS_TREND, (*flat(-0.4, 10), *flat(5.5, 21), 0)),
        Track(metrics.LOSS_RISING_STEPS, (*flat(0, 10), *ramp(60, 60, 21), 0)),
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
        Track(metrics.LOSS, (*flat(2.6, 10), 300.0)),
        Track(metrics.LOSS_TREND, (*flat(-0.4, 10), 900.0, 0)),
        Track(metrics.LOSS_LOST_STEPS, (*flat(0, 11), *ramp(600, 600, 50))),
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
    tracks=(Track(metrics.LOSS_LOST_STEPS, (*flat(0, 5), *ramp(60, 60, 10), 0)),),
    fires={Severity.CRITICAL: _LOST_TEXT.replace("{run}", "demo").replace("{value|count}", "600")},
    at=18,
    not_yet=(4, 36),
)

_FALLING = Example(
    title="a loss that falls", minutes=20, tracks=(Track(metrics.LOSS_TREND, (-8,)),)
)

_WAVES = Example(
    title="a loss that oscillates slowly",
    minutes=20,
    tracks=(Track(metrics.LOSS_TREND, (2.5, 0.5, -1.5, 0.3) * 5),),
)

_TOUCHES = Example(
    title="a trend that only touches the limit, with slow steps",
    minutes=30,
    tracks=(
        Track(metrics.LOSS_TREND, (*flat(1, 10), *flat(3.4, 14), 1)),
        Track(metrics.LOSS_RISING_STEPS, (*flat(0, 10), *ramp(4, 4, 14), 0)),
    ),
)

_YOUNG = Example(
    title="a run that does not have two long windows yet", minutes=20, without=(metrics.LOSS_TREND,)
)

LOSS_DIVERGING = Condition(
    name="MpAgentLossDiverging",
    summary="The loss is rising.",
    meaning="The model gets worse with every step, and the compute is wasted.",
    confirm="Plot mp_agent_loss_median and mp_agent_loss_best over the last hours, with "
    "mp_agent_learning_rate and mp_agent_grad_norm; find out what changed when the loss started "
    "to rise.",
    remedies=(
        "Resume from a checkpoint from before the rise, with a learning rate of a third to a "
        "tenth.",
        "Check what changed at that step: schedule, data mixture, batch size, a resumed optimizer "
        "without its state.",
        "If the loss scale fell or gradients grew at the same time, handle those first.",
    ),
    why="A loss that rises for a thousand steps does not recover by itself: the weights have "
    "left the region where the learning rate is small enough.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="damaged, since the loss does not come back",
                now="stop, and resume from a checkpoint from before the loss rose, earlier than "
                "{first}",
            ),
            when=happened(_LOST),
            keep=duration("diverging_keep"),
            description=_LOST_TEXT,
            reason="No delay: the node agent first counts loss_lost_steps losses, independent "
            "of the step time, and the alert lasts until the loss has recovered.",
        ),
        Level(
            severity=Severity.WARNING,
            when=all_of(
                Compare(_TREND, ">", limit("loss_trend_deviations")),
                Compare(_RISING, ">=", limit("loss_rising_steps")),
            ),
            keep=duration("diverging_keep"),
            description="The loss of run {run} has risen by {value|number} deviations from one "
            "long window to the next.",
            reason="The windows are long; the condition requires loss_rising_steps losses above "
            "the limit, and the alert lasts beyond a return to it.",
        ),
    ),
    firing=(_RISEN, _THROWN_BACK, _RECOVERED),
    quiet=(_FALLING, _WAVES, _TOUCHES, _YOUNG),
)
