"""Examples of MpAgentTrainInferenceMismatch."""

from mp_agent.alerting.conditions.tensors import (
    _EXTREME,
    _HIGH,
    _described,
)
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.terms import Limit
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat


def _track(bound: Limit, *steps: float) -> Track:
    return Track(metrics.LOGPROB_MISMATCH_STEPS, (*flat(0, 10), *steps), {"bound": bound})


_DIFFERENT = Example(
    title="a rollout engine in another precision",
    minutes=16,
    tracks=(_track(_HIGH, 1, 2, 3, 4), _track(_EXTREME, 0)),
    fires={Severity.WARNING: _described(_HIGH, "demo", "4")},
    at=15,
    not_yet=(11,),
)

_OTHER_WEIGHTS = Example(
    title="a rollout engine that has not received the weights",
    minutes=16,
    tracks=(_track(_HIGH, 1, 2, 3, 4), _track(_EXTREME, 1, 2, 3, 4)),
    fires={Severity.CRITICAL: _described(_EXTREME, "demo", "4")},
    at=15,
    not_yet=(11,),
)

_ONCE = Example(
    title="two steps whose rollouts began before the last update",
    minutes=20,
    tracks=(_track(_HIGH, 1, 2), _track(_EXTREME, 1, 2)),
)

_OFF = Example(
    title="a run without reinforcement learning",
    minutes=15,
    without=(metrics.LOGPROB_MISMATCH_STEPS,),
)

EXAMPLES = {
    "MpAgentTrainInferenceMismatch": Examples(
        firing=(_DIFFERENT, _OTHER_WEIGHTS),
        quiet=(_ONCE, _OFF),
    ),
}
