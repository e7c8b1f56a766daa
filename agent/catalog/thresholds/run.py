"""Limits of a run's pace, ranks and restarts."""

from mp_agent.catalog.thresholds.threshold import Threshold

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
