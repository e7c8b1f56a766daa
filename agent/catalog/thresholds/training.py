"""Limits of the loss, the learning rate, and of steps that train nothing."""

from mp_agent.catalog.thresholds.threshold import Threshold

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
