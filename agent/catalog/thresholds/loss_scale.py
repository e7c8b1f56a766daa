"""Limits of the loss scale, and of steps that overflow."""

from mp_agent.catalog.thresholds.threshold import Threshold

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
)
