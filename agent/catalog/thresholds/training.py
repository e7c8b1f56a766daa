"""What a threshold is, and those of loss scale, loss, learning rate and the run."""

from dataclasses import dataclass


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


LOSS_SCALE_THRESHOLDS = (
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
        name="loss_scale_change_steps",
        value=600.0,
        unit="{step}",
        meaning="steps within which changes of the loss scale are counted",
        below="loss_scale_fall_steps",
    ),
    Threshold(
        name="loss_scale_fall_steps",
        value=43_200.0,
        unit="{step}",
        meaning="steps for a slow fall of the loss scale",
    ),
    Threshold(
        name="loss_scale_low_steps",
        value=60.0,
        unit="{step}",
        meaning="consecutive steps with a loss scale that is low and falling",
    ),
    Threshold(
        name="loss_scale_share_of_initial_steps",
        value=240.0,
        unit="{step}",
        meaning="consecutive steps with a collapsed loss scale: more than the rest of an attempt",
    ),
    Threshold(
        name="loss_scale_very_low_steps",
        value=600.0,
        unit="{step}",
        meaning="consecutive steps with a loss scale below loss_scale_very_low",
    ),
    Threshold(
        name="loss_scale_reduced_steps",
        value=900.0,
        unit="{step}",
        meaning="consecutive steps with a loss scale below loss_scale_reduced",
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
        meaning="skipped steps below which a share is not significant",
        below="overflow_steps",
    ),
    Threshold(
        name="overflow_steps",
        value=300.0,
        unit="{step}",
        meaning="steps after calibration below which there is no share of skipped ones",
        below="overflow_share_steps",
    ),
    Threshold(
        name="overflow_share_steps",
        value=1000.0,
        unit="{step}",
        meaning="last steps whose share of skipped ones is judged",
        below="overflow_rise_steps",
    ),
    Threshold(
        name="overflow_rise_steps",
        value=5000.0,
        unit="{step}",
        meaning="steps in each of the three windows in which a rising share is looked for",
    ),
)


TRAINING_THRESHOLDS = (
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
        name="loss_growth",
        value=2.0,
        unit="{factor}",
        meaning="loss, divided by its best level, from which a loss that climbed there and stays "
        "is lost",
    ),
    Threshold(
        name="loss_solved",
        value=0.001,
        unit="1",
        meaning="share of its first level at which a loss is next to nothing: small gradients are "
        "then no fault",
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
        value=48.0,
        unit="{step}",
        meaning="consecutive steps without possible learning after which nothing is trained",
    ),
    Threshold(
        name="zero_rate_steps",
        value=32.0,
        unit="{step}",
        meaning="the same where all learning rates are 0, which no schedule is meant to be for "
        "more than a few steps",
    ),
    Threshold(
        name="probably_untrained_steps",
        value=192.0,
        unit="{step}",
        meaning="the same where a falling loss, which takes some losses to see, can disprove it",
    ),
    Threshold(
        name="layers_without_gradient",
        value=0.5,
        unit="1",
        meaning="share of the trained layers without any gradient above which most are not trained",
    ),
    Threshold(
        name="constant_loss_steps",
        value=500.0,
        unit="{step}",
        meaning="consecutive equal losses after which nothing is trained",
    ),
    Threshold(
        name="learning_rate_jump",
        value=10.0,
        unit="{factor}",
        meaning="learning rate, divided by its highest value so far, that a warm-up does not "
        "explain",
    ),
    Threshold(
        name="learning_rate_fall",
        value=0.001,
        unit="1",
        meaning="share of its highest value of the last 64 steps to which a learning rate does not "
        "fall by a schedule that was meant so",
    ),
    Threshold(
        name="resumed_steps",
        value=10.0,
        unit="{step}",
        meaning="steps by which a schedule or a trainer is ahead of the first step of a run that "
        "goes on from a checkpoint",
    ),
    Threshold(
        name="loop_mistake_steps",
        value=32.0,
        unit="{step}",
        meaning="consecutive steps with a mistake in the order of clearing, clipping and stepping",
    ),
    Threshold(
        name="evaluation_mode_steps",
        value=32.0,
        unit="{step}",
        meaning="consecutive steps in evaluation mode, of a model that was in training mode before",
    ),
    Threshold(
        name="autocast_fp32_share",
        value=0.5,
        unit="1",
        meaning="share of FP32 among linear layers and convolutions under autocast to 16 bits",
    ),
    Threshold(
        name="autocast_fp32_samples",
        value=3.0,
        unit="{sample}",
        meaning="consecutive samples above autocast_fp32_share from which autocast has no effect",
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
)


OPTIMIZER_THRESHOLDS = (
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
        name="updates_lost_steps",
        value=20.0,
        unit="{step}",
        meaning="steps over which all samples must lose more, at a learning rate that does not "
        "rise, since the first updates of a warm-up are tiny",
    ),
    Threshold(
        name="updates_rounded",
        value=0.99,
        unit="1",
        meaning="share of the elements of 16-bit weights that did not change over several steps "
        "above which nothing is learned",
    ),
    Threshold(
        name="adam_below_epsilon",
        value=0.5,
        unit="1",
        meaning="share of elements whose second moment is below epsilon that is unsafe",
    ),
)


RUN_THRESHOLDS = (
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
        name="unreduced_steps",
        value=64.0,
        unit="{step}",
        meaning="consecutive steps of replicas with gradients of their own, without weights that "
        "are equal again, after which no averaging is to be expected; more than the period of "
        "local SGD, and 8 times as many where no wrapper shows that they are replicas",
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
)
