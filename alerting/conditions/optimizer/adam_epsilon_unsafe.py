"""MpAgentAdamEpsilonUnsafe."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, any_of
from mp_agent.alerting.expressions.signals import Number, Series, limit
from mp_agent.alerting.severity import Severity

_BELOW = Series(metric=metrics.ADAM_BELOW_EPSILON)
_LOST = Series(metric=metrics.ADAM_EPSILON_LOST)
_TEXT = (
    "Adam's epsilon does not suit the second moments of run demo: it is either above the root of "
    "most of them, or below the smallest number of their format."
)

_SMALL_MOMENTS = Example(
    title="second moments whose root is below epsilon in most elements",
    minutes=20,
    tracks=(Track(metrics.ADAM_BELOW_EPSILON, (*flat(0.1, 5), 0.7)),),
    fires={Severity.WARNING: _TEXT},
    at=15,
    not_yet=(6,),
)

_FP16_STATE = Example(
    title="state in FP16 with an epsilon of 1e-8",
    minutes=20,
    tracks=(Track(metrics.ADAM_EPSILON_LOST, (1,)),),
    fires={Severity.WARNING: _TEXT},
    at=10,
    not_yet=(3,),
)

_SOME = Example(
    title="a minority of elements with tiny second moments, such as of rare tokens",
    minutes=20,
    tracks=(Track(metrics.ADAM_BELOW_EPSILON, (0.4,)),),
)

_ONE_LOOK = Example(
    title="tiny gradients in the first samples",
    minutes=20,
    tracks=(Track(metrics.ADAM_BELOW_EPSILON, (*flat(0.9, 4), 0.02)),),
)

ADAM_EPSILON_UNSAFE = Condition(
    name="MpAgentAdamEpsilonUnsafe",
    summary="Adam's epsilon does not suit its second moments or their format.",
    meaning="Where the root of the second moment is below epsilon, the update shrinks with the "
    "gradient: Adam becomes plain gradient descent with a tiny learning rate. Where epsilon "
    "is below the smallest number of the state's format it acts as 0, and a second moment that "
    "underflows makes the update infinite.",
    confirm="mp_agent_adam_below_epsilon_ratio and mp_agent_adam_epsilon_lost_ratio.",
    remedies=(
        "For state in FP16: use an epsilon of 1e-7 or more, or keep the state in FP32.",
        "For second moments below epsilon: lower epsilon, with state in FP32, or stop dividing "
        "the loss by large constants.",
    ),
    why="Epsilon is to prevent a division by zero without setting the size of the update: it has "
    "to lie between the format's smallest number and the root of the second moments. Judged only "
    "if the setting measure_updates is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=any_of(
                Compare(_BELOW, ">", limit("adam_below_epsilon")), Compare(_LOST, ">", Number(0))
            ),
            hold=duration("update_hold"),
            description="Adam's epsilon does not suit the second moments of run {run}: it is "
            "either above the root of most of them, or below the smallest number of their format.",
            reason="The delay covers several samples: the first gradients can be tiny.",
        ),
    ),
    firing=(_SMALL_MOMENTS, _FP16_STATE),
    quiet=(_SOME, _ONE_LOOK),
)
