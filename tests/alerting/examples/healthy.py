"""The series of a run in good health: FP16 with a scaler, long past calibration."""

from collections.abc import Mapping

from mp_agent.alerting.expressions import Limit, limit
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import (
    activations,
    agent,
    distribution,
    fp8,
    gradient_layers,
    gradients,
    optimizer,
    ranks,
    reinforcement,
    routers,
    run,
    tensors,
    training,
)
from tests.alerting.examples.example import Example, Track, Value, ramp

_STEPS_PER_MINUTE = 60
_CONSTANT: Mapping[Metric, float] = {
    run.RUN_ACTIVE: 1,
    optimizer.ADAM_BELOW_EPSILON: 0.01,
    optimizer.ADAM_EPSILON_LOST: 0,
    gradient_layers.CLIP_SCALED_STEPS: 0,
    run.COVERAGE: 1,
    gradients.GRAD_FINITE: 1,
    gradients.GRAD_FP16_HEADROOM: 6,
    gradients.GRAD_NORM: 1.2,
    gradient_layers.GRAD_NORM_PEAK: 4.5,
    gradients.GRAD_NORM_WINDOW_MAX: 1.9,
    gradient_layers.LAYERS_DEAD: 0,
    gradient_layers.LAYERS_EXPLODING: 0,
    fp8.LAYERS_FP8_MISSCALED: 0,
    fp8.LAYERS_FP8_FLUSHED: 0,
    optimizer.LAYERS_MOMENT_STALE: 0,
    gradient_layers.LAYERS_UNDERFLOWING: 0,
    gradient_layers.LAYERS_WITHOUT_GRADIENT: 0,
    training.LOSS_LOST_STEPS: 0,
    training.LOSS_MEDIAN: 2,
    training.LOSS_FALL: 0.1,
    training.LOSS_SOLVED: 0,
    training.LOSS_RISING_STEPS: 0,
    training.LOSS_SCALE: 65536,
    training.LOSS_SCALE_CALIBRATED: 65536,
    training.LOSS_SCALE_INITIAL: 65536,
    training.LOSS_TREND: -0.4,
    activations.ATTENTION_LOGIT_GROWTH: 1.2,
    activations.ATTENTION_LOGIT_MAX: 12,
    activations.OUTPUT_LOGSUMEXP_GROWTH: 1.1,
    activations.OUTPUT_LOGSUMEXP_SIZE: 11,
    routers.ROUTERS_COLLAPSED: 0,
    ranks.PAUSE_LONGEST: 5,
    ranks.RANKS_LAGGING: 0,
    ranks.STEP_USUAL: 1,
    ranks.STRAGGLER_DELAY: 0.03,
    ranks.STRAGGLER_SLOWDOWN: 1.05,
}
_COUNTERS = (
    activations.ACTIVATION_NEAR_OVERFLOW,
    activations.ACTIVATION_NONFINITE,
    run.ATTEMPTS,
    gradients.CLIPPED_STEPS,
    training.GRAD_NONFINITE_REPEATED,
    training.GRAD_NONFINITE_REPLACED,
    training.LEARNING_RATE_JUMPS,
    training.LEARNING_RATE_FALLS,
    training.LOSS_NONFINITE_REPEATED,
    run.LOSS_NONFINITE_STEPS,
    training.LOSS_NONFINITE_UNSKIPPED,
    training.LOSS_SCALE_DECREASES,
    training.LOSS_SCALE_FLOOR_STALLS,
    training.LOSS_SCALE_LOWERED_AGAIN,
    training.LOSS_SCALE_INCREASES,
    training.LOSS_SPIKE_STEPS,
    gradients.NONFINITE_UPDATES,
    training.SKIPPED_STEPS,
)
_NODE_COUNTERS = (
    agent.PROBE_ERRORS,
    agent.RECORDS_DROPPED,
    agent.SERIES_DROPPED,
    agent.SETTING_ERRORS,
)
_BOUNDS = tuple({"bound": limit(name)} for name in ("grad_norm_high", "grad_norm_extreme"))
_K3_BOUNDS = tuple({"bound": limit(name)} for name in ("logprob_k3_high", "logprob_k3_extreme"))
_LOW = ("grad_norm_low", "grad_norm_very_low", "grad_norm_vanished")
_LOW_SCALES = (
    "loss_scale_reduced",
    "loss_scale_very_low",
    "loss_scale_low",
    "loss_scale_share_of_initial",
)
_OVERFLOWS = ("overflow_warning", "overflow_critical", "overflow_rising")
_SUSTAINED = (
    "underflow_layers",
    "fp16_floor",
    "fp16_flushed",
    "updates_lost",
    "adam_below_epsilon",
)
_REPLICAS = ("gradients", "weights", "state")
NODE = {"node_rank": "0"}
"""Label of what a node agent exports about itself."""


def healthy_tracks(minutes: int) -> tuple[Track, ...]:
    """Return the series of a healthy run, from minute 0 to `minutes`."""
    samples = minutes + 1
    return (
        *(Track(metric, (value,)) for metric, value in _CONSTANT.items()),
        *(Track(metric, (0,)) for metric in _COUNTERS),
        *(Track(metric, (0,), NODE) for metric in _NODE_COUNTERS),
        *(Track(gradient_layers.GRAD_EXPLODED, (0,), bound) for bound in _BOUNDS),
        *(Track(gradient_layers.GRAD_EXPLODED_UNCLIPPED, (0,), bound) for bound in _BOUNDS),
        *(Track(reinforcement.LOGPROB_MISMATCH_STEPS, (0,), bound) for bound in _K3_BOUNDS),
        *(Track(gradient_layers.GRAD_NORM_BELOW, (0,), {"limit": name}) for name in _LOW),
        *(Track(training.LOSS_SCALE_LOW_STEPS, (0,), {"limit": name}) for name in _LOW_SCALES),
        *(Track(training.SKIPPED_EXCESS, (0,), {"bound": limit(name)}) for name in _OVERFLOWS),
        *(Track(gradient_layers.SUSTAINED_STEPS, (0,), {"limit": name}) for name in _SUSTAINED),
        *(Track(gradient_layers.REPLICA_DIVERGENCE, (0,), {"kind": kind}) for kind in _REPLICAS),
        *(
            Track(gradient_layers.REPLICA_DIVERGENCE_STEPS, (0,), {"kind": kind})
            for kind in _REPLICAS
        ),
        Track(distribution.GRAD_FP16_FLUSHED, (0,), {"scale": "in_force"}),
        Track(tensors.TENSOR_REDUCTION_SWALLOWED, (0.001,), {"tensor": "losses"}),
        Track(tensors.TENSOR_SLICE_IMBALANCE, (12,), {"tensor": "inputs"}),
        Track(agent.BUILD, (1,), {**NODE, "version": "0.1.0"}),
        Track(run.PHASE, (1,), {"phase": "backward"}),
        Track(run.RUN_INFO, (1,), {"world_size": "8", "precision": "fp16"}),
        Track(run.STEP, ramp(5000, _STEPS_PER_MINUTE, samples)),
        Track(run.STEPS, ramp(5000, _STEPS_PER_MINUTE, samples)),
        Track(run.LOSS, noisy(2.0, samples)),
        Track("up", (1,)),
    )


def clocks(example: Example, step: Track, steps: Track) -> tuple[Track, ...]:
    """Return what follows from a run's steps: their count in this attempt, how long it stands.

    And since when the node agent counts. step, steps: the tracks of the example.
    """
    began_seconds, samples = 60 * example.age_minutes, example.minutes + 1
    since, last = 0, steps.values[0]
    standing: list[Value] = []
    pairs = zip(step.over(example.minutes), steps.over(example.minutes), strict=True)
    for minute, value in enumerate(steps.over(example.minutes)):
        if value not in (last, None):
            since, last = minute, value
        standing.append(None if last is None else 60.0 * (minute - since))
    return (
        Track(agent.COUNTING, ramp(began_seconds, 60, samples), NODE),
        Track(ranks.STANDING, tuple(standing)),
        Track(run.ATTEMPT_STEP, tuple(_lower(*pair) for pair in pairs)),
    )


def _lower(one: Value, other: Value) -> Value:
    numbers = [value for value in (one, other) if isinstance(value, float | int)]
    return min(numbers) if len(numbers) == 2 else None


def noisy(mean: float, samples: int, *, slope: float = 0.0) -> tuple[Value, ...]:
    """Return a loss around `mean` that jumps by some percent and drifts by `slope` a minute."""
    jumps = ((index * 7 % 11) / 11 - 0.45 for index in range(samples))
    return tuple(mean * (1 + 0.1 * jump) + slope * index for index, jump in enumerate(jumps))


def same_series(one: Track, other: Track) -> bool:
    """Return whether two tracks are of one series."""
    return one.name == other.name and _labels(one) == _labels(other)


def _labels(track: Track) -> set[tuple[str, str | Limit]]:
    return set(track.labels.items())
