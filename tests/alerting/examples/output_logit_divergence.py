"""Examples of MpAgentOutputLogitDivergence."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

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

EXAMPLES = {
    "MpAgentOutputLogitDivergence": Examples(
        firing=(_GROWN, _OUTLASTED),
        quiet=(_LARGE, _YOUNG, _OFF),
    ),
}
