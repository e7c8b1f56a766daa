"""Attention logits, of the run and of each module, at the latest step that was sampled."""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.columns import ATTENTION
from mp_agent.records.views import LayerView, RunView


def _largest(run: RunView) -> Reading:
    return run.families.get(ATTENTION.name, {}).get("logit_max")


def _growth(run: RunView) -> Reading:
    return None if run.health.logits is None else run.health.logits.attention_growth


def _high_layers(run: RunView) -> Reading:
    logits = run.health.logits
    return {(name,): 1.0 for name in logits.high_names} if logits else None


def _largest_of_layer(layer: LayerView) -> Reading:
    return layer.values.get("logit_max") if layer.judged else None


ATTENTION_METRICS = (
    Metric(
        name="mp_agent.attention.logit.max",
        unit="{logit}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Largest attention logit (scaled product of query and key, with the mask or bias "
        "added) of a few heads and positions of each attention module, in the first forward pass "
        "of a sampled step.",
        read=_largest,
    ),
    Metric(
        name="mp_agent.attention.logit.growth",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Median of the last three samples of that logit, divided by the median of the run's "
        "earlier half of samples, or by 1 where that is less. Absent before 8 samples.",
        read=_growth,
    ),
    Metric(
        name="mp_agent.attention.nonfinite.logits",
        unit="{logit}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Attention logits that were NaN or Inf, of those looked at, in the steps that were "
        "sampled.",
        count=lambda change: change.step.families.get(ATTENTION.name, {}).get(
            "nonfinite_elements", 0.0
        ),
    ),
    Metric(
        name="mp_agent.attention.high_layer.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("layer",),
        thresholds=("attention_logit_high",),
        help="A module whose largest attention logit was above its limit in the latest sample; 10 "
        "at most, those with the largest.",
        read=_high_layers,
    ),
)

ATTENTION_LAYER_METRICS = (
    Metric(
        name="mp_agent.layer.attention.logit.max",
        unit="{logit}",
        kind=Kind.GAUGE,
        scope=Scope.LAYER,
        family=ATTENTION.name,
        help="Largest attention logit of a few heads and positions of the module, in the first "
        "forward pass of a sampled step.",
        read=_largest_of_layer,
    ),
)
