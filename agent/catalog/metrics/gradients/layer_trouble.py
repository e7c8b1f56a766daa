"""Run scope: how many layers stop learning, as of the latest step that was sampled."""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.views import RunView


def _dead(run: RunView) -> Reading:
    return None if run.health.layers is None else float(run.health.layers.dead)


def _dead_names(run: RunView) -> Reading:
    return {(name,): 1.0 for name in run.health.layers.dead_names} if run.health.layers else None


def _exploding(run: RunView) -> Reading:
    return None if run.health.layers is None else float(run.health.layers.exploding)


def _exploding_names(run: RunView) -> Reading:
    layers = run.health.layers
    return {(name,): 1.0 for name in layers.exploding_names} if layers else None


def _underflowing(run: RunView) -> Reading:
    return None if run.health.layers is None else run.health.layers.underflowing_share


def _underflowing_names(run: RunView) -> Reading:
    layers = run.health.layers
    return {(name,): 1.0 for name in layers.underflowing_names} if layers else None


def _without_gradient(run: RunView) -> Reading:
    found = run.health.without_gradient
    return None if found is None else found.share


def _names_without_gradient(run: RunView) -> Reading:
    found = run.health.without_gradient
    return None if found is None else {(name,): 1.0 for name in found.names}


def _sampled_step(run: RunView) -> Reading:
    return {(family,): float(step) for family, step in run.sampled_steps.items()}


LAYER_TROUBLE_METRICS = (
    Metric(
        name="mp_agent.sampled.step",
        unit="{step}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        labels=("family",),
        help="The trainer's step on which layers, and statistics that are not measured on every "
        "step, were last measured: their gauges keep the values of that step. Label family says "
        "of what: gradients, optimizer, distribution, activations or tensors.",
        read=_sampled_step,
    ),
    Metric(
        name="mp_agent.layers.dead",
        unit="{layer}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("layer_dead_abs_max", "layer_dead_samples", "layer_fall"),
        help="Layers whose gradient was close to zero in three consecutive samples, and far "
        "below its initial values; layers that never had a gradient, or have none at times "
        "(frozen, unused, idle experts), are not counted.",
        read=_dead,
    ),
    Metric(
        name="mp_agent.dead_layer.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("layer",),
        help="Such a layer; 10 at most, those nearest to the input.",
        read=_dead_names,
    ),
    Metric(
        name="mp_agent.layers.underflowing",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("layer_zero_rise", "layer_flushed"),
        help="Share of the layers whose gradient has far more zeros than in their first "
        "samples, or is largely below FP16's smallest number at the loss scale in force; absent "
        "before there are such samples.",
        read=_underflowing,
    ),
    Metric(
        name="mp_agent.underflowing_layer.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("layer",),
        help="Such a layer; 10 at most, those nearest to the input.",
        read=_underflowing_names,
    ),
    Metric(
        name="mp_agent.layers.exploding",
        unit="{layer}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("layer_growth", "layer_dead_samples"),
        help="Layers whose gradient norm was far above their own usual one in three consecutive "
        "samples, while that of most layers was not.",
        read=_exploding,
    ),
    Metric(
        name="mp_agent.exploding_layer.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("layer",),
        help="Such a layer; 10 at most, those nearest to the input.",
        read=_exploding_names,
    ),
    Metric(
        name="mp_agent.layers.without_gradient",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("untrained_steps",),
        help="Share of the layers that the optimizer holds, and that require gradients, which have "
        "never had one since the start of the attempt; absent during the first 64 steps. Idle "
        "experts are not counted, and neither are layers of optimizers without any gradient.",
        read=_without_gradient,
    ),
    Metric(
        name="mp_agent.layer.without_gradient.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("layer",),
        help="Such a layer; 10 at most, those nearest to the input.",
        read=_names_without_gradient,
    ),
)
