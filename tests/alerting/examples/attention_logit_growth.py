"""Examples of MpAgentAttentionLogitGrowth."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_NAMED = (
    "The largest attention logit of run demo is 160, more than <logit_growth> times what it was "
    "earlier in the run."
)

_GROWN = Example(
    title="attention logits that grow to a multiple of what they were",
    minutes=46,
    tracks=(
        Track(metrics.ATTENTION_LOGIT_MAX, (*flat(20, 10), *flat(160, 20), 20)),
        Track(metrics.ATTENTION_LOGIT_GROWTH, (*flat(1.1, 10), *flat(8, 20), 1.1)),
        Track(
            metrics.ATTENTION_HIGH_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "blocks.2.attn"},
        ),
    ),
    fires={Severity.WARNING: f"{_NAMED} Largest in blocks.2.attn."},
    at=20,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="attention logits that were large for some minutes, directly afterwards",
    minutes=36,
    tracks=(
        Track(metrics.ATTENTION_LOGIT_MAX, (*flat(20, 10), *flat(160, 20), 20)),
        Track(metrics.ATTENTION_LOGIT_GROWTH, (*flat(1.1, 10), *flat(8, 20), 1.1)),
    ),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_LARGE = Example(
    title="large attention logits that were so from the beginning",
    minutes=15,
    tracks=(
        Track(metrics.ATTENTION_LOGIT_MAX, (300,)),
        Track(metrics.ATTENTION_LOGIT_GROWTH, (1.05,)),
    ),
)

_YOUNG = Example(
    title="attention logits that grow from almost nothing, as in every young run",
    minutes=15,
    tracks=(
        Track(metrics.ATTENTION_LOGIT_MAX, (*flat(2, 5), 30)),
        Track(metrics.ATTENTION_LOGIT_GROWTH, (*flat(1, 5), 15)),
    ),
)

_OFF = Example(
    title="a run that does not measure attention",
    minutes=15,
    without=(metrics.ATTENTION_LOGIT_MAX, metrics.ATTENTION_LOGIT_GROWTH),
)

EXAMPLES = {
    "MpAgentAttentionLogitGrowth": Examples(
        firing=(_GROWN, _OUTLASTED),
        quiet=(_LARGE, _YOUNG, _OFF),
    ),
}
