"""Metrics of norms, of layers, of a rank's own gradients and of replicas."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

from mp_agent.catalog.metric import (
    Reading,
    counter,
    gauge,
    info,
    layer_counter,
    layer_gauge,
    rank_counter,
    rank_gauge,
)
from mp_agent.catalog.metrics.gradients import OPTIMIZER, optimizer_labels
from mp_agent.catalog.metrics.optimizer import share
from mp_agent.catalog.thresholds import level_label
from mp_agent.records.columns import LOCAL_GRAD_NONFINITE_ELEMENTS, LOCAL_GRAD_NORM
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import LayerView, RankView, RunView

_HIGH_BOUNDS = ("grad_norm_high", "grad_norm_extreme")
_LOW_BOUNDS = ("grad_norm_low", "grad_norm_very_low", "grad_norm_vanished")


def _wide(run: RunView) -> bool:
    """Return whether small gradients are not rounded to 0: their zeros are those of a ReLU."""
    narrow = run.facts.get("scaler") or run.facts.get("fp8_library")
    return run.facts.get("precision") in ("fp32", "bf16") and not narrow


def _below(run: RunView) -> Reading:
    main = run.norms.get("")
    return {(name,): float(steps) for name, steps in main.below.items()} if main else None


def _bounds(thresholds: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    return tuple((level_label(name),) for name in _HIGH_BOUNDS)


def _exploded(change: StepTransition) -> Reading:
    return _above(change, change.exploded)


def _unclipped(change: StepTransition) -> Reading:
    """Leave out what did not reach the weights; of a clipping that is the main optimizer's part."""
    if change.step.weights_kept:
        return None
    contained = change.step.contained
    norms = {name: norm for name, norm in change.exploded.items() if name or not contained}
    return _above(change, norms)


def _above(change: StepTransition, norms: Mapping[str, float]) -> Reading:
    if not norms:
        return None
    largest = max(norms.values())
    return {(level_label(name),): float(largest > change.thresholds[name]) for name in _HIGH_BOUNDS}


GRAD_NORM_PEAK = gauge(
    "mp_agent.grad.norm.usual.peak",
    "{norm}",
    optional_labels=OPTIMIZER,
    help="Largest value of mp_agent_grad_norm_usual so far.",
    read=lambda run: {optimizer_labels(name): norms.peak for name, norms in run.norms.items()},
)
GRAD_NORM_BELOW = gauge(
    "mp_agent.grad.norm.below.steps",
    "{step}",
    labels=("limit",),
    thresholds=_LOW_BOUNDS,
    help="Consecutive steps whose gradient norm was below the threshold that `limit` names.",
    read=_below,
)
GRAD_EXPLODED = counter(
    "mp_agent.grad.exploded.steps",
    "{step}",
    labels=("bound",),
    label_values=_bounds,
    thresholds=(*_HIGH_BOUNDS, "grad_norm_growth"),
    help="Steps whose gradient norm, for any optimizer, was above the bound and far above "
    "its own usual value.",
    count=_exploded,
)
GRAD_EXPLODED_UNCLIPPED = counter(
    "mp_agent.grad.exploded.unclipped.steps",
    "{step}",
    labels=("bound",),
    label_values=_bounds,
    thresholds=(*_HIGH_BOUNDS, "grad_norm_growth"),
    help="Steps whose gradient norm was above the bound and far above its own usual value, and "
    "on which neither clipping nor the guard is known to have reduced the gradients, or to have "
    "kept them from the weights.",
    count=_unclipped,
)
CLIP_SCALED_STEPS = gauge(
    "mp_agent.clip.scaled.steps",
    "{step}",
    help="Consecutive steps whose clipping saw gradients that were still multiplied by the "
    "loss scale; 0 if it runs after unscale_.",
    read=lambda run: float(run.learning.scaled_clip_steps),
)

NORM_GROWTH = gauge(
    "mp_agent.grad.norm.usual.growth",
    "{factor}",
    help="Usual gradient norm of the last 32 steps, divided by the lowest usual one so far; 0 "
    "where the learning rate has doubled since, or the norm was nearly as large at first.",
    read=lambda run: None if run.norm_growth is None else run.norm_growth.growth,
)
NORM_GROWN = info(
    "mp_agent.grad_norm_growth.info",
    labels=("lowest", "usual"),
    help="The lowest usual gradient norm so far, and the present one.",
    read=lambda run: (
        None
        if run.norm_growth is None
        else {(f"{run.norm_growth.lowest:.3g}", f"{run.norm_growth.usual:.3g}"): 1.0}
    ),
)

NORM_METRICS = (
    NORM_GROWTH,
    NORM_GROWN,
    gauge(
        "mp_agent.grad.norm.usual",
        "{norm}",
        optional_labels=OPTIMIZER,
        help="Median of the last 128 gradient norms, without those that exploded.",
        read=lambda run: (
            {optimizer_labels(name): norms.usual for name, norms in run.norms.items()}
        ),
    ),
    gauge(
        "mp_agent.grad.norm.deviation",
        "{norm}",
        optional_labels=OPTIMIZER,
        help="Standard deviation of the last 128 gradient norms, without those that exploded; its "
        "square is their variance.",
        read=lambda run: (
            {optimizer_labels(name): norms.deviation for name, norms in run.norms.items()}
        ),
    ),
    GRAD_NORM_PEAK,
    GRAD_NORM_BELOW,
    GRAD_EXPLODED,
    GRAD_EXPLODED_UNCLIPPED,
    CLIP_SCALED_STEPS,
)


def _names_without_gradient(run: RunView) -> Reading:
    found = run.without_gradient
    return None if found is None else {(name,): 1.0 for name in found.names}


LAYERS_DEAD = gauge(
    "mp_agent.layers.dead",
    "{layer}",
    thresholds=("layer_dead_abs_max", "layer_dead_samples", "layer_fall"),
    help="Layers whose gradient was close to zero in three consecutive samples, and far "
    "below its initial values; layers that never had a gradient, or have none at times "
    "(frozen, unused, idle experts), are not counted.",
    read=lambda run: None if run.layers is None else float(run.layers.dead),
)
DEAD_LAYER = info(
    "mp_agent.dead_layer.info",
    labels=("layer",),
    help="A layer whose gradient is close to zero and once was not; 10 at most, those nearest "
    "to the input.",
    read=lambda run: {(name,): 1.0 for name in run.layers.dead_names} if run.layers else None,
)
LAYERS_UNDERFLOWING = gauge(
    "mp_agent.layers.underflowing",
    "1",
    thresholds=("layer_zero_rise", "layer_flushed"),
    help="Share of the layers whose gradient has far more zeros than in their first samples, "
    "or is largely below FP16's smallest number at the loss scale in force; absent before "
    "the first samples are there, and in FP32 and BF16, which reach to 1e-38.",
    read=lambda run: None if _wide(run) or not run.layers else run.layers.underflowing_share,
)
UNDERFLOWING_LAYER = info(
    "mp_agent.underflowing_layer.info",
    labels=("layer",),
    help="A layer whose gradient has far more zeros than at first, or is largely below FP16's "
    "smallest number; 10 at most, those nearest to the input.",
    read=lambda run: (
        {(name,): 1.0 for name in run.layers.underflowing_names}
        if run.layers and not _wide(run)
        else None
    ),
)
LAYERS_EXPLODING = gauge(
    "mp_agent.layers.exploding",
    "{layer}",
    thresholds=("layer_growth", "layer_dead_samples"),
    help="Layers whose gradient norm was far above their own usual one in three consecutive "
    "samples, while that of most layers was not.",
    read=lambda run: None if run.layers is None else float(run.layers.exploding),
)
EXPLODING_LAYER = info(
    "mp_agent.exploding_layer.info",
    labels=("layer",),
    help="A layer whose gradient norm is far above its own usual one; 10 at most, those "
    "nearest to the input.",
    read=lambda run: {(name,): 1.0 for name in run.layers.exploding_names} if run.layers else None,
)
LAYERS_WITHOUT_GRADIENT = gauge(
    "mp_agent.layers.without_gradient",
    "1",
    thresholds=("untrained_steps",),
    help="Share of the layers that the optimizer holds, and that require gradients, which have "
    "never had one since the start of the attempt; absent during the first 48 steps. Idle "
    "experts are not counted, and neither are layers of optimizers without any gradient.",
    read=lambda run: None if run.without_gradient is None else run.without_gradient.share,
)
LAYER_WITHOUT_GRADIENT = info(
    "mp_agent.layer.without_gradient.info",
    labels=("layer",),
    help="A layer that has never had a gradient although it requires one; 10 at most, those "
    "nearest to the input.",
    read=_names_without_gradient,
)

SUSTAINED_STEPS = gauge(
    "mp_agent.sustained.steps",
    "{step}",
    labels=("limit",),
    thresholds=(
        "underflow_layers",
        "fp16_flushed",
        "fp16_headroom_bits",
        "updates_lost",
        "adam_below_epsilon",
    ),
    help="Steps from the first to the last of the latest consecutive samples that were beyond the "
    "limit named by the label: a threshold, or `fp16_floor` for smallest gradients at FP16's "
    "smallest number. 0 if the last sample was not.",
    read=lambda run: {(limit,): float(steps) for limit, steps in run.sustained_steps.items()},
)

LAYER_TROUBLE_METRICS = (
    SUSTAINED_STEPS,
    gauge(
        "mp_agent.sampled.step",
        "{step}",
        labels=("family",),
        help="The trainer's step on which layers, and statistics that are not measured on every "
        "step, were last measured: their gauges keep the values of that step. Label family says "
        "of what: gradients, optimizer, distribution, activations or tensors.",
        read=lambda run: (
            {(family,): float(step) for family, step in run.latest.sampled_steps.items()}
        ),
    ),
    LAYERS_DEAD,
    DEAD_LAYER,
    LAYERS_UNDERFLOWING,
    UNDERFLOWING_LAYER,
    LAYERS_EXPLODING,
    EXPLODING_LAYER,
    LAYERS_WITHOUT_GRADIENT,
    LAYER_WITHOUT_GRADIENT,
)


def _of_elements(column: str) -> Callable[[LayerView], Reading]:
    """Return what reads a column divided by the number of elements, which are all finite."""

    def read(layer: LayerView) -> Reading:
        if not layer.judged or column not in layer.values:
            return None
        return share(layer.values, column, "elements")

    return read


LAYER_METRICS = (
    layer_gauge(
        "mp_agent.layer.grad.norm",
        "{norm}",
        help="L2 norm of the layer's unscaled gradient before clipping.",
        read=lambda layer: sqrt(layer.values["sum_squares"]) if layer.judged else None,
    ),
    layer_gauge(
        "mp_agent.layer.grad.abs_max",
        "{gradient}",
        help="Largest gradient magnitude in the layer.",
        read=lambda layer: layer.values["abs_max"] if layer.judged else None,
    ),
    layer_gauge(
        "mp_agent.layer.grad.abs_min",
        "{gradient}",
        help="Smallest gradient magnitude in the layer other than zero; absent when all are zero.",
        gives_way=True,
        read=lambda layer: layer.values.get("abs_min") if layer.judged else None,
    ),
    layer_gauge(
        "mp_agent.layer.grad.abs_mean",
        "{gradient}",
        help="Mean gradient magnitude in the layer, zeros included.",
        gives_way=True,
        read=_of_elements("abs_sum"),
    ),
    layer_gauge(
        "mp_agent.layer.grad.zero",
        "1",
        help="Share of the layer's gradient elements that are exactly zero.",
        read=_of_elements("zero_elements"),
    ),
    layer_counter(
        "mp_agent.layer.grad.nonfinite.elements",
        "{element}",
        help="NaN and Inf gradient elements of the layer, in the steps that were sampled.",
        count=lambda layer: (
            layer.values.get("nan_elements", 0.0) + layer.values.get("inf_elements", 0.0)
        ),
    ),
)


_OF_WHAT = (
    "the rank's own gradients of the step, as its last backward left them before they were "
    "reduced over the ranks"
)


def _norm(rank: RankView) -> Reading:
    return None if rank.values is None else rank.values.get(LOCAL_GRAD_NORM)


RANK_LOCAL_GRADIENT_METRICS = (
    rank_gauge(
        "mp_agent.rank.local_grad.norm",
        "{gradient}",
        help=f"L2 norm over the finite elements of {_OF_WHAT}, unscaled; absent where that was "
        "not measured.",
        read=_norm,
    ),
    rank_counter(
        "mp_agent.rank.local_grad.nonfinite.elements",
        "{element}",
        help=f"NaN and Inf elements of {_OF_WHAT}; those of an overflow that GradScaler skips "
        "count, too.",
        count=lambda values: values.get(LOCAL_GRAD_NONFINITE_ELEMENTS),
        appears_when_counted=True,
    ),
)


_KINDS = ("gradients", "weights", "state")
_NAMED_AT_MOST = 8


def _diverging_steps(change: StepTransition) -> Reading:
    return {(kind,): float(not found.agree) for kind, found in change.step.replicas.items()}


def _divergent_ranks(run: RunView) -> Reading:
    return {
        (
            kind,
            str(found.step),
            ",".join(map(str, found.minority_ranks)),
            _names(found.tensors),
        ): 1.0
        for kind, found in run.replicas.items()
        if not found.agree
    }


def _divergent_rates(run: RunView) -> Reading:
    found = (own.rates for own in run.replicas.values() if not own.agree)
    return {tuple(f"{rate:.6g}" for rate in rates): 1.0 for rates in found if rates}


def _names(tensors: Sequence[str]) -> str:
    """Return the names of some tensors, and how many more there are."""
    more = len(tensors) - _NAMED_AT_MOST
    return ",".join(tensors[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _unexplained(run: RunView) -> Reading:
    found = run.replicas.get("state")
    return {} if found is None else {(): float(len(found.unjudged))}


def _local_state(run: RunView) -> Reading:
    found = run.replicas.get("state")
    if found is None:
        return {}
    named = {"by design": found.local, "unknown": found.unjudged}
    return {(why, _names(tensors)): 1.0 for why, tensors in named.items() if tensors}


REPLICA_DIVERGENCE = gauge(
    "mp_agent.replica.divergence",
    "",
    labels=("kind",),
    help="1 if ranks that must have the same gradients, or weights, differed when they were "
    "last compared, else 0; absent if there was nothing to compare, and while they differ as they "
    "do where each updates with gradients of its own. Weights are compared before the "
    "update; state is what else a checkpoint holds: frozen parameters, buffers.",
    read=lambda run: {(kind,): float(not found.agree) for kind, found in run.replicas.items()},
)
REPLICA_DIVERGENCE_STEPS = counter(
    "mp_agent.replica.divergence.steps",
    "{step}",
    labels=("kind",),
    label_values=lambda thresholds: tuple((kind,) for kind in _KINDS),
    help="Steps on which ranks that must have the same gradients, or weights, were compared "
    "and differed.",
    count=_diverging_steps,
)
DIVERGENT_RANKS = info(
    "mp_agent.divergent_ranks.info",
    labels=("kind", "step", "ranks", "tensors"),
    help="The step on which ranks last differed, the ranks that differ from the majority (none "
    "if there is no majority), and the tensors that differ, as far as they are known.",
    read=_divergent_ranks,
)
DIVERGENT_RATES = info(
    "mp_agent.divergent_rates.info",
    labels=("lowest", "highest"),
    help="The lowest and the highest learning rate of the ranks, of the first parameter group, on "
    "the step on which replicas last differed; absent where these are equal.",
    read=_divergent_rates,
)
REPLICA_UNREDUCED_STEPS = gauge(
    "mp_agent.replica.unreduced.steps",
    "{step}",
    thresholds=("unreduced_steps",),
    help="Consecutive steps that ranks which hold copies of one model have made with "
    "gradients that were not reduced, or not all of them, once no periodic averaging of the "
    "weights explains it; else 0.",
    read=lambda run: float(run.unreduced_steps),
)
REPLICA_UNEXPLAINED = gauge(
    "mp_agent.replica.unexplained.tensors",
    "{tensor}",
    help="Frozen parameters and buffers of which a checkpoint would hold one rank's alone: "
    "they differ between ranks that train the same weights, are not local by design, and were "
    "never seen equal; absent if there was nothing to compare.",
    read=_unexplained,
)
LOCAL_STATE = info(
    "mp_agent.local_state.info",
    labels=("why", "tensors"),
    help="Frozen parameters and buffers that differ between ranks which train the same "
    "weights: by design, as statistics of BatchNorm do, or for an unknown reason.",
    read=_local_state,
)

REPLICA_METRICS = (
    REPLICA_DIVERGENCE,
    REPLICA_DIVERGENCE_STEPS,
    DIVERGENT_RANKS,
    DIVERGENT_RATES,
    REPLICA_UNREDUCED_STEPS,
    REPLICA_UNEXPLAINED,
    LOCAL_STATE,
)
