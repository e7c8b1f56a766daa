"""MpAgentAttentionLogitGrowth."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, all_of
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.severity import Severity

_LARGEST = Series(metric=metrics.ATTENTION_LOGIT_MAX)
_GROWTH = Series(metric=metrics.ATTENTION_LOGIT_GROWTH)
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

ATTENTION_LOGIT_GROWTH = Condition(
    name="MpAgentAttentionLogitGrowth",
    summary="Attention logits are growing.",
    meaning="Softmax of such logits picks a single position, hardly any gradient comes through, "
    "and in BF16 they are rounded to steps of 0.5 and more. The loss often diverges later.",
    confirm="mp_agent_attention_logit_max over the whole run, and "
    "mp_agent_layer_attention_logit_max of the layers that "
    "mp_agent_attention_high_layer_info names.",
    remedies=(
        "Normalize queries and keys (QK-norm), or clip the weights that make them (QK-clip).",
        "Lower the learning rate, or extend its warm-up.",
        "Resume from a checkpoint from before the growth, if the loss has already suffered.",
    ),
    why="Logits grow with the norms of the query and key weights, which a learning rate that is "
    "too high raises together; a normalization bounds them. Judged only if the setting "
    "measure_attention is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=all_of(
                Compare(_LARGEST, ">", limit("attention_logit_high")),
                Compare(_GROWTH, ">", limit("logit_growth")),
            ),
            keep=duration("layer_keep"),
            description="The largest attention logit of run {run} is {value|number}, more than "
            "<logit_growth> times what it was earlier in the run."
            "{mp_agent_attention_high_layer_info| Largest in |layer}",
            reason="No delay: the growth is already a median of three samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    firing=(_GROWN, _OUTLASTED),
    quiet=(_LARGE, _YOUNG, _OFF),
)
