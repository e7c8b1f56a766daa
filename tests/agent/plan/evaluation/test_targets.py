"""Each target at its limit."""

from dataclasses import replace
from math import nan

from mp_agent.plan.evaluation.model import (
    Outcome,
    SideMeasurement,
    loss_target,
    memory_target,
    speed_target,
    tensor_core_target,
)
from mp_agent.plan.precision_plan import GOALS
from tests.agent.plan.evaluation.measured import overflowing_evaluation
from tests.subtests import each

FINE = SideMeasurement(losses=(1.0, 0.9, 0.8), seconds=(1.0, 1.0, 1.0))
LOST = SideMeasurement(losses=(1.0, nan, nan), seconds=(1.0, 1.0, 1.0))


@each(
    ("target", "outcome"),
    [
        (speed_target(2.0, 1.9, 2.1), Outcome.MISSED),
        (speed_target(2.01, 1.9, 2.1), Outcome.MET),
        (memory_target(0.3), Outcome.MISSED),
        (memory_target(0.31), Outcome.MET),
        (memory_target(-0.2), Outcome.MISSED),
        (loss_target(0.005, None), Outcome.MISSED),
        (loss_target(0.0049, 0.1), Outcome.MET),
        (loss_target(None, 0.0), Outcome.MISSED),
        (tensor_core_target(1.0), Outcome.NOT_MEASURED),
    ],
)
def test_a_target_is_met_beyond_its_limit_only(target, outcome):
    assert target.outcome is outcome


def test_what_was_measured_is_written():
    assert memory_target(-0.2).value == "-20 %"
    assert loss_target(None, 0.25).value.startswith("the loss is not finite (FP32 from weights")


@each(
    ("change", "goals", "text"),
    [
        ({"speed_interval": (0.7, 0.9), "speed_ratio": 0.8}, ["speed"], "0.80 times as fast as"),
        ({"speed_interval": (0.7, 1.1)}, [], ""),
        ({"planned_peak_bytes": 2048, "fp32_peak_bytes": 1024}, ["memory"], "a peak of 2 KiB"),
        ({"planned_peak_bytes": 2048, "fp32_peak_bytes": 1024, "device": "cuda"}, [], ""),
        ({"loss_difference_ratio": 0.06}, list(GOALS), "differs from that of FP32 by 6 % (bad)"),
        ({"loss_difference_ratio": 0.05}, [], ""),
        ({"loss_difference_ratio": 0.06, "perturbed_difference_ratio": 0.04}, [], ""),
        ({"planned": LOST}, list(GOALS), "not finite from step 2 on"),
        ({"planned": LOST, "fp32": LOST}, [], ""),
    ],
)
def test_a_plan_is_rejected_for_a_goal_by_what_was_measured(change, goals, text):
    fine = {
        "speed_interval": (1.1, 1.3),
        "planned_peak_bytes": 1024,
        "fp32_peak_bytes": 2048,
        "loss_difference_ratio": 0.001,
        "perturbed_difference_ratio": 0.001,
        "planned": FINE,
        "fp32": FINE,
    }
    found = replace(overflowing_evaluation(), **{**fine, **change})
    assert list(found.rejections) == goals
    assert all(text in why for why in found.rejections.values())
