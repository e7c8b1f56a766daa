"""When every layer is looked at."""

import pytest
import torch

from mp_agent.catalog.thresholds import DEFAULTS, resolve
from mp_agent.probe.step.layer_schedule import LayerSchedule


def totals(squares: float = 1.0, nan: float = 0.0, inf: float = 0.0) -> torch.Tensor:
    return torch.tensor([[squares / 2, 1, 0, nan, 0, 9], [squares / 2, 1, 0, 0, inf, 9]])


def test_by_plan_early_often_then_by_interval():
    schedule = LayerSchedule(40, DEFAULTS)
    due = [sequence for sequence in range(1, 201) if schedule.due(sequence)]
    assert due == [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 120, 160, 200]


@pytest.mark.parametrize(
    "trouble", [totals(nan=1), totals(inf=1), totals(squares=101.0**2), totals(squares=1e300)]
)
def test_trouble_is_looked_at(trouble):
    assert LayerSchedule(100, DEFAULTS).wanted_for_trouble(trouble)


@pytest.mark.parametrize("quiet", [totals(), totals(squares=0), totals(squares=99.0**2)])
def test_no_trouble_is_not(quiet):
    assert not LayerSchedule(100, DEFAULTS).wanted_for_trouble(quiet)


def test_the_limit_is_the_threshold_in_force():
    schedule = LayerSchedule(100, resolve({"grad_norm_high": 10.0}))
    assert schedule.wanted_for_trouble(totals(squares=121.0))
    assert not schedule.wanted_for_trouble(totals(squares=99.0))


def test_lasting_trouble_is_looked_at_three_times_then_every_ten_steps():
    schedule = LayerSchedule(100, DEFAULTS)
    looked = [step for step in range(1, 31) if schedule.wanted_for_trouble(totals(nan=1))]
    assert looked == [1, 2, 3, 10, 20, 30]
    assert not schedule.wanted_for_trouble(totals())
    assert schedule.wanted_for_trouble(totals(nan=1))


def test_forward_passes_are_measured_before_steps_that_are_due_and_after_the_first():
    schedule = LayerSchedule(40, DEFAULTS)
    before = [sequence for sequence in range(1, 125) if schedule.due_after(sequence)]
    assert before == [1, 9, 19, 29, 39, 49, 59, 69, 79, 89, 99, 119]


def test_forward_passes_are_measured_after_trouble_as_often_as_it_is_looked_at():
    schedule = LayerSchedule(100, DEFAULTS)
    after = []
    for sequence in range(201, 221):
        schedule.wanted_for_trouble(totals(nan=1))
        if schedule.due_after(sequence):
            after.append(sequence)
    assert after == [201, 202, 203, 210, 220]
    schedule.wanted_for_trouble(totals())
    assert not schedule.due_after(221)
