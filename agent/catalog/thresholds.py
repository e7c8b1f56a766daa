"""Every number that a condition compares against, declared once.

The node agent counts against them (`mp_agent_grad_norm_exceeded_steps_total`), the conditions
catalog renders rules from them, dashboards draw them. The setting `thresholds` overrides by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mp_agent.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A default limit with its unit and meaning.

    unit: `1` for shares, which are at most 1; `{thing}` for all else.
    below: the threshold that this one must be lower than, such as the one of a worse severity.
    """

    name: str
    value: float
    unit: str
    meaning: str
    below: str = ""


THRESHOLDS = (
    Threshold(
        name="grad_norm_high",
        value=100.0,
        unit="{norm}",
        meaning="gradient norm above which to check clipping and the learning rate",
        below="grad_norm_extreme",
    ),
    Threshold(
        name="grad_norm_extreme",
        value=1000.0,
        unit="{norm}",
        meaning="gradient norm that damages the weights in a single step",
    ),
    Threshold(
        name="grad_norm_growth",
        value=10.0,
        unit="{factor}",
        meaning="gradient norm, divided by the run's usual one, from which a large norm counts "
        "as explosion",
    ),
    Threshold(
        name="grad_norm_fall",
        value=0.01,
        unit="1",
        meaning="share of the run's largest usual norm above which a small norm counts as normal",
    ),
    Threshold(
        name="grad_norm_low",
        value=0.01,
        unit="{norm}",
        meaning="gradient norm below the healthy range of 0.1 to 10",
    ),
    Threshold(
        name="grad_norm_very_low",
        value=0.001,
        unit="{norm}",
        meaning="gradient norm at which learning nearly stops",
        below="grad_norm_low",
    ),
    Threshold(
        name="grad_norm_vanished",
        value=1e-6,
        unit="{norm}",
        meaning="gradient norm of a model that no longer learns",
        below="grad_norm_very_low",
    ),
    Threshold(
        name="layer_dead_abs_max",
        value=1e-10,
        unit="{gradient}",
        meaning="largest gradient magnitude of a layer that no longer learns",
    ),
    Threshold(
        name="layer_dead_samples",
        value=3.0,
        unit="{sample}",
        meaning="consecutive samples below layer_dead_abs_max from which a layer is dead",
    ),
    Threshold(
        name="layer_fall",
        value=0.001,
        unit="1",
        meaning="share of a layer's first gradients below which a tiny gradient is dead",
    ),
    Threshold(
        name="layer_growth",
        value=100.0,
        unit="{factor}",
        meaning="norm of a layer, divided by its usual one and by that of other layers, that is "
        "explosion",
    ),
    Threshold(
        name="layer_zero_rise",
        value=0.2,
        unit="1",
        meaning="increase of a gradient's zero share over its early level that is underflow",
    ),
    Threshold(
        name="underflow_layers",
        value=0.05,
        unit="1",
        meaning="share of underflowing layers from which learning suffers",
    ),
    Threshold(
        name="layer_flushed",
        value=0.31,
        unit="1",
        meaning="share of a layer's gradient elements below FP16's smallest number that is "
        "underflow",
    ),
    Threshold(
        name="fp16_flushed",
        value=0.05,
        unit="1",
        meaning="share of the non-zero gradients that FP16 rounds to zero from which a larger "
        "loss scale is needed",
    ),
    Threshold(
        name="fp16_headroom_bits",
        value=1.0,
        unit="{bit}",
        meaning="headroom below which the next doubling of the loss scale overflows",
    ),
    Threshold(
        name="moment_rms_high",
        value=2.3,
        unit="{factor}",
        meaning="root of the mean of squared gradients divided by Adam's second moment, of a "
        "layer, from which the moments are out of date",
    ),
    Threshold(
        name="moment_rms_samples",
        value=2.0,
        unit="{sample}",
        meaning="consecutive samples with such a root",
    ),
    Threshold(
        name="updates_lost",
        value=0.5,
        unit="1",
        meaning="share of the updates of 16-bit weights whose loss in rounding stops learning",
    ),
    Threshold(
        name="adam_below_epsilon",
        value=0.5,
        unit="1",
        meaning="share of elements whose second moment is below epsilon that is unsafe",
    ),
    Threshold(
        name="loss_scale_low",
        value=128.0,
        unit="{scale}",
        meaning="loss scale that, while still falling, leaves FP16 too little range",
        below="loss_scale_very_low",
    ),
    Threshold(
        name="loss_scale_very_low",
        value=1024.0,
        unit="{scale}",
        meaning="loss scale far below the healthy 32 768 to 65 536",
        below="loss_scale_reduced",
    ),
    Threshold(
        name="loss_scale_reduced",
        value=10000.0,
        unit="{scale}",
        meaning="loss scale below the healthy 32 768 to 65 536",
    ),
    Threshold(
        name="loss_scale_share_of_initial",
        value=0.01,
        unit="1",
        meaning="share of its initial value below which the loss scale has collapsed",
    ),
    Threshold(
        name="loss_scale_share_of_calibrated",
        value=0.125,
        unit="1",
        meaning="share of its calibrated value at which the loss scale has fallen",
    ),
    Threshold(
        name="loss_scale_decreases_in_row",
        value=5.0,
        unit="{change}",
        meaning="consecutive downward changes of the loss scale without an upward one",
    ),
    Threshold(
        name="loss_scale_floor",
        value=1.0,
        unit="{scale}",
        meaning="loss scale at which GradScaler no longer helps",
        below="loss_scale_low",
    ),
    Threshold(
        name="floor_skips",
        value=3.0,
        unit="{step}",
        meaning="skipped steps at the loss scale's floor from which lowering it does not help",
        below="floor_skip_steps",
    ),
    Threshold(
        name="floor_skip_steps",
        value=100.0,
        unit="{step}",
        meaning="steps within which floor_skips of them mean that training has stalled",
    ),
    Threshold(
        name="overflow_warning",
        value=0.01,
        unit="1",
        meaning="skipped steps per attempted step; healthy is 1 in 2000",
        below="overflow_critical",
    ),
    Threshold(
        name="overflow_critical",
        value=0.1,
        unit="1",
        meaning="skipped steps per attempted step at which training makes little progress",
    ),
    Threshold(
        name="calibration_steps",
        value=500.0,
        unit="{step}",
        meaning="steps during which GradScaler may still calibrate its scale",
    ),
    Threshold(
        name="loss_scale_net_decreases",
        value=3.0,
        unit="{change}",
        meaning="downward minus upward changes of the loss scale from which it is falling",
    ),
    Threshold(
        name="overflow_rising",
        value=0.001,
        unit="1",
        meaning="skipped steps per attempted step above which a rising share is a warning",
        below="overflow_warning",
    ),
    Threshold(
        name="overflow_skips",
        value=3.0,
        unit="{step}",
        meaning="skipped steps below which a share of slow steps is not significant",
        below="overflow_steps",
    ),
    Threshold(
        name="overflow_steps",
        value=100.0,
        unit="{step}",
        meaning="steps below which overflow_long_window is used instead of overflow_window",
    ),
    Threshold(
        name="nonfinite_losses",
        value=3.0,
        unit="{step}",
        meaning="consecutive non-finite losses from which skipped steps count too",
    ),
    Threshold(
        name="loss_spike_deviations",
        value=6.0,
        unit="{deviation}",
        meaning="median absolute deviations above its rolling median that make a loss a spike",
    ),
    Threshold(
        name="loss_spike_noisy_deviations",
        value=12.0,
        unit="{deviation}",
        meaning="the same for noisy losses, which are often above loss_spike_deviations",
    ),
    Threshold(
        name="loss_rising_steps",
        value=64.0,
        unit="{step}",
        meaning="consecutive losses with a trend above loss_trend_deviations that are divergence",
    ),
    Threshold(
        name="loss_lost_steps",
        value=64.0,
        unit="{step}",
        meaning="consecutive losses far above the best level after which the run is lost",
    ),
    Threshold(
        name="nonfinite_gradients",
        value=3.0,
        unit="{step}",
        meaning="consecutive steps with non-finite gradients that a scaler's calibration does "
        "not explain",
    ),
    Threshold(
        name="untrained_steps",
        value=64.0,
        unit="{step}",
        meaning="consecutive steps without possible learning after which nothing is trained",
    ),
    Threshold(
        name="constant_loss_steps",
        value=500.0,
        unit="{step}",
        meaning="consecutive identical losses after which nothing is trained",
    ),
    Threshold(
        name="learning_rate_jump",
        value=10.0,
        unit="{factor}",
        meaning="learning rate, divided by its highest value so far, that a warm-up does not "
        "explain",
    ),
    Threshold(
        name="scaled_clip_steps",
        value=16.0,
        unit="{step}",
        meaning="consecutive steps whose clipping saw gradients still multiplied by the loss scale",
    ),
    Threshold(
        name="loss_trend_deviations",
        value=3.0,
        unit="{deviation}",
        meaning="increase of the loss between two long windows, in deviations, that is divergence",
    ),
    Threshold(
        name="loss_deviation_floor",
        value=0.01,
        unit="1",
        meaning="share of the loss below which its deviation is not significant",
    ),
    Threshold(
        name="straggler_ratio",
        value=1.3,
        unit="{factor}",
        meaning="compute time of a rank, divided by the median of all ranks, from which it is a "
        "straggler",
    ),
    Threshold(
        name="straggler_share",
        value=0.05,
        unit="1",
        meaning="share of the usual step time from which the cost of a straggler matters",
    ),
    Threshold(
        name="restarts",
        value=7.0,
        unit="{attempt}",
        meaning="attempts within restarts_window that preemption alone does not explain",
    ),
    Threshold(
        name="phase_growth",
        value=5.0,
        unit="{factor}",
        meaning="time in evaluation or a checkpoint, divided by the run's longest so far, that "
        "is a hang",
    ),
    Threshold(
        name="stall_steps",
        value=10.0,
        unit="{step}",
        meaning="usual step times that a pause must exceed to be a stall",
    ),
    Threshold(
        name="fp16_near_overflow",
        value=60_000.0,
        unit="{activation}",
        meaning="magnitude above which an element of an FP16 output counts as close to overflow, "
        "which is at 65 504",
    ),
    Threshold(
        name="attention_logit_high",
        value=100.0,
        unit="{logit}",
        meaning="attention logit above which growth is a warning: softmax is saturated",
    ),
    Threshold(
        name="logsumexp_high",
        value=100.0,
        unit="{logit}",
        meaning="magnitude of the output logits' log-sum-exp above which growth is a warning",
    ),
    Threshold(
        name="logit_growth",
        value=2.0,
        unit="{factor}",
        meaning="logits, divided by those of the run's past, that have grown",
    ),
    Threshold(
        name="router_entropy_low",
        value=0.25,
        unit="1",
        meaning="entropy of a router, of 0 to 1, below which it decides for few experts alone",
    ),
    Threshold(
        name="router_load_high",
        value=3.0,
        unit="{factor}",
        meaning="load of a router's most loaded expert, divided by the mean over its experts, that "
        "is far from even",
    ),
    Threshold(
        name="router_collapse_samples",
        value=3.0,
        unit="{sample}",
        meaning="consecutive samples with both, after which a router counts as collapsed",
    ),
    Threshold(
        name="logprob_k3_high",
        value=0.01,
        unit="{nat}",
        meaning="k3 estimate of the KL divergence of sampler and trainer that rounding in 16 bits "
        "alone seldom reaches",
        below="logprob_k3_extreme",
    ),
    Threshold(
        name="logprob_k3_extreme",
        value=0.1,
        unit="{nat}",
        meaning="k3 estimate at which sampler and trainer are different policies",
    ),
    Threshold(
        name="logprob_delta_tail",
        value=0.1,
        unit="{nat}",
        meaning="difference of the log-probabilities that one token in a thousand must exceed: a "
        "k3 estimate of a few extreme tokens alone is not judged",
    ),
    Threshold(
        name="logprob_steps",
        value=3.0,
        unit="{step}",
        meaning="steps within logprob_window on which trainer and sampler must differ",
    ),
    Threshold(
        name="reduction_swallowed",
        value=0.01,
        unit="1",
        meaning="share of the terms of a watched sum that is lost in its dtype, above which the "
        "sum is wrong by more than rounding",
    ),
    Threshold(
        name="dimension_imbalance",
        value=1e4,
        unit="{factor}",
        meaning="largest range of a slice of a watched tensor, divided by the smallest, above "
        "which 16 bits lose the smaller ones",
    ),
)

DEFAULTS: Mapping[str, float] = {threshold.name: threshold.value for threshold in THRESHOLDS}
BY_NAME: Mapping[str, Threshold] = {threshold.name: threshold for threshold in THRESHOLDS}


def resolve(overrides: Mapping[str, float]) -> dict[str, float]:
    """Return all thresholds with `overrides` applied.

    An unknown name, a value that is not above 0, a share above 1, and a limit that is not below
    the one that it belongs below raise SettingError.
    """
    for name, value in overrides.items():
        if name not in DEFAULTS:
            raise SettingError(f"thresholds: {name!r} is unknown; known: {', '.join(DEFAULTS)}")
        if not 0 < value < float("inf"):
            raise SettingError(f"thresholds: {name} has value {value!r}; it must be above 0")
        if BY_NAME[name].unit == "1" and value > 1:
            raise SettingError(f"thresholds: {name} has value {value!r}; it is a share, at most 1")
    values = {**DEFAULTS, **overrides}
    for threshold in THRESHOLDS:
        name, upper = threshold.name, threshold.below
        if upper and values[name] >= values[upper]:
            raise SettingError(
                f"thresholds: {name} has value {values[name]!r}; it must be below {upper}, "
                f"which is {values[upper]!r}"
            )
    return values


def level_label(name: str) -> str:
    """Return what stands for a threshold in a label: the level that its name ends with.

    The same whatever the number is: a job with thresholds of its own is found by the same rules.
    """
    return name.rpartition("_")[2]


def bound_label(value: float) -> str:
    """Return a threshold as texts have it: `100`, `0.001`, `1e-06`."""
    return f"{value:g}"
