"""MpAgentOutputLogitDivergence."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, all_of
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.severity import Severity

_SIZE = Series(metric=metrics.OUTPUT_LOGSUMEXP_SIZE)
_GROWTH = Series(metric=metrics.OUTPUT_LOGSUMEXP_GROWTH)
_NAMED = (
    "The log-sum-exp of the output logits of run demo has reached a magnitude of 240, more than "
    "<logit_growth> times what it was earlier in the run."
)

_GROWN = Example(
    title="output logits that drift far away from zero",
    minutes=46,
    tracks=(
        Track(metrics.OUTPUT_LOGSUMEXP_SIZE, (*flat(11, 10), *flat(240, 20), 11)),
        Track(metrics.OUTPUT_LOGSUMEXP_GROWTH, (*flat(1, 10), *flat(20, 20), 1)),
    ),
    fires={Severity.WARNING: _NAMED},
    at=20,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="output logits that were far away from zero for some minutes, directly afterwards",
    minutes=36,
    tracks=(
        Track(metrics.OUTPUT_LOGSUMEXP_SIZE, (*flat(11, 10), *flat(240, 20), 11)),
        Track(metrics.OUTPUT_LOGSUMEXP_GROWTH, (*flat(1, 10), *flat(20, 20), 1)),
    ),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_LARGE = Example(
    title="a large log-sum-exp that was so from the beginning",
    minutes=15,
    tracks=(
        Track(metrics.OUTPUT_LOGSUMEXP_SIZE, (300,)),
        Track(metrics.OUTPUT_LOGSUMEXP_GROWTH, (1.05,)),
    ),
)

_YOUNG = Example(
    title="a log-sum-exp that grows with what the model learns",
    minutes=15,
    tracks=(
        Track(metrics.OUTPUT_LOGSUMEXP_SIZE, (*flat(6, 5), 25)),
        Track(metrics.OUTPUT_LOGSUMEXP_GROWTH, (*flat(1, 5), 4)),
    ),
)

_OFF = Example(
    title="a run that does not measure output logits",
    minutes=15,
    without=(metrics.OUTPUT_LOGSUMEXP_SIZE, metrics.OUTPUT_LOGSUMEXP_GROWTH),
)

OUTPUT_LOGIT_DIVERGENCE = Condition(
    name="MpAgentOutputLogitDivergence",
    summary="Output logits are drifting away from zero.",
    meaning="The loss does not depend on a number that is added to all logits of a row, so nothing "
    "holds them near zero. Far away from it, BF16 rounds them to steps of 0.5 and more, the loss "
    "becomes noisy, and the run often diverges.",
    confirm="mp_agent_output_logsumexp_mean, _max and _min over the whole run show the direction "
    "of the drift.",
    remedies=(
        "Add a z-loss: 1e-4 times the square of the log-sum-exp.",
        "Compute the logits and the loss in FP32.",
        "Lower the learning rate of the output layer, or let weight decay act on it.",
    ),
    why="A z-loss pulls the log-sum-exp back to zero and changes nothing else. Judged only if the "
    "setting measure_attention is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=all_of(
                Compare(_SIZE, ">", limit("logsumexp_high")),
                Compare(_GROWTH, ">", limit("logit_growth")),
            ),
            keep=duration("layer_keep"),
            description="The log-sum-exp of the output logits of run {run} has reached a magnitude "
            "of {value|number}, more than <logit_growth> times what it was earlier in the run.",
            reason="No delay: the growth is already a median of three samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    firing=(_GROWN, _OUTLASTED),
    quiet=(_LARGE, _YOUNG, _OFF),
)
