"""MpAgentLearningRateJump."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Count
from mp_agent.alerting.severity import Severity

_JUMPS = Count(metric=metrics.LEARNING_RATE_JUMPS, window=duration("incident_window"))

_JUMP = Example(
    title="a learning rate that suddenly grows three thousandfold",
    minutes=26,
    tracks=(Track(metrics.LEARNING_RATE_JUMPS, (*flat(0, 10), 1)),),
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
    tracks=(Track(metrics.LEARNING_RATE_JUMPS, (0,)),),
)

LEARNING_RATE_JUMP = Condition(
    name="MpAgentLearningRateJump",
    summary="The learning rate has jumped.",
    meaning="Updates are suddenly many times as large as those that the weights were trained "
    "with; the loss often rises within some steps.",
    confirm="Plot mp_agent_learning_rate together with mp_agent_loss and mp_agent_grad_norm.",
    remedies=(
        "Check the schedule: its units (steps or epochs), its base rate, and whether it was "
        "restored with the optimizer.",
        "If the loss has risen, resume from a checkpoint from before the jump with the old rate.",
    ),
    why="A schedule rises smoothly or restarts at an earlier rate; a rate ten times above all "
    "previous ones is nearly always a mistake in its units or its base.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_JUMPS),
            description="The learning rate of run {run} rose to <learning_rate_jump> times its "
            "highest value so far, or more, within the last <incident_window>.",
            reason="No delay: the learning rate is known exactly.",
        ),
    ),
    firing=(_JUMP,),
    quiet=(_WARM_UP,),
)
