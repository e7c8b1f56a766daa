"""Metrics of attention and output logits."""

from collections.abc import Callable

from mp_agent.catalog.metric import Reading, counter, gauge, info, layer_gauge
from mp_agent.records.columns import ATTENTION, LOGITS
from mp_agent.records.views import LayerView, RunView


def _largest_of_layer(layer: LayerView) -> Reading:
    return layer.values.get("logit_max") if layer.judged else None


ATTENTION_LOGIT_MAX = gauge(
    "mp_agent.attention.logit.max",
    "{logit}",
    help="Largest attention logit (scaled product of query and key, with the mask or bias "
    "added) of a few heads and positions of each attention module, in the first forward pass "
    "of a sampled step.",
    read=lambda run: run.latest.families.get(ATTENTION.name, {}).get("logit_max"),
)
ATTENTION_LOGIT_GROWTH = gauge(
    "mp_agent.attention.logit.growth",
    "{factor}",
    help="Median of the last three samples of that logit, divided by the median of the run's "
    "earlier half of samples, or by 1 where that is less. Absent before 8 samples.",
    read=lambda run: None if run.logits is None else run.logits.attention_growth,
)
ATTENTION_HIGH_LAYER = info(
    "mp_agent.attention.high_layer.info",
    labels=("layer",),
    thresholds=("attention_logit_high",),
    help="A module whose largest attention logit was above its limit in the latest sample; 10 "
    "at most, those with the largest.",
    read=lambda run: {(name,): 1.0 for name in run.logits.high_names} if run.logits else None,
)

ATTENTION_METRICS = (
    ATTENTION_LOGIT_MAX,
    ATTENTION_LOGIT_GROWTH,
    counter(
        "mp_agent.attention.nonfinite.logits",
        "{logit}",
        help="Attention logits that were NaN or Inf, of those looked at, in the steps that were "
        "sampled.",
        count=lambda change: change.step.families.get(ATTENTION.name, {}).get(
            "nonfinite_elements", 0.0
        ),
    ),
    ATTENTION_HIGH_LAYER,
)

ATTENTION_LAYER_METRICS = (
    layer_gauge(
        "mp_agent.layer.attention.logit.max",
        "{logit}",
        family=ATTENTION.name,
        help="Largest attention logit of a few heads and positions of the module, in the first "
        "forward pass of a sampled step.",
        read=_largest_of_layer,
    ),
)


def _of_run(column: str) -> Callable[[RunView], Reading]:
    return lambda run: run.latest.families.get(LOGITS.name, {}).get(column)


def _mean(run: RunView) -> Reading:
    row = run.latest.families.get(LOGITS.name, {})
    rows = row.get("rows", 0.0) - row.get("nonfinite_rows", 0.0)
    return row["logsumexp_sum"] / rows if rows and "logsumexp_sum" in row else None


OUTPUT_LOGSUMEXP_SIZE = gauge(
    "mp_agent.output.logsumexp.size",
    "{logit}",
    help="Largest magnitude of a log-sum-exp of the rows of output logits looked at.",
    read=lambda run: None if run.logits is None else run.logits.logsumexp_size,
)
OUTPUT_LOGSUMEXP_GROWTH = gauge(
    "mp_agent.output.logsumexp.growth",
    "{factor}",
    help="Median of the last three samples of mp_agent_output_logsumexp_size, divided by the "
    "median of the run's earlier half of samples, or by 1 where that is less. Absent "
    "before 8 samples.",
    read=lambda run: None if run.logits is None else run.logits.logsumexp_growth,
)

OUTPUT_LOGIT_METRICS = (
    gauge(
        "mp_agent.output.logit.max",
        "{logit}",
        help="Largest finite logit of a few rows that cross_entropy was given, in the first "
        "forward pass of a sampled step.",
        read=_of_run("logit_max"),
    ),
    gauge(
        "mp_agent.output.logsumexp.max",
        "{logit}",
        help="Largest log-sum-exp (log Z, by which softmax normalizes) of the rows of output "
        "logits looked at.",
        read=_of_run("logsumexp_max"),
    ),
    gauge(
        "mp_agent.output.logsumexp.min",
        "{logit}",
        help="Smallest log-sum-exp of the rows of output logits looked at.",
        read=_of_run("logsumexp_min"),
    ),
    gauge(
        "mp_agent.output.logsumexp.mean",
        "{logit}",
        help="Mean log-sum-exp of the rows of output logits looked at, where it is finite.",
        read=_mean,
    ),
    OUTPUT_LOGSUMEXP_SIZE,
    OUTPUT_LOGSUMEXP_GROWTH,
    counter(
        "mp_agent.output.nonfinite.rows",
        "{row}",
        help="Rows whose log-sum-exp was NaN or Inf, of those looked at, in the steps that were "
        "sampled.",
        count=lambda change: change.step.families.get(LOGITS.name, {}).get("nonfinite_rows", 0.0),
    ),
)
