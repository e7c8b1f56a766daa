"""When every layer is looked at."""

from math import inf, nan

import pytest
import torch

from mp_agent.catalog.thresholds import DEFAULTS, resolve
from mp_agent.probe.step.layer_schedule import LayerSchedule
from tests.subtests import each


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


def due_after_trouble_at(step: int, *, noted_after: int = 0, factor: int = 1) -> list[int]:
    """The steps beyond the 200th that are due, where `step` is not finite."""
    schedule = LayerSchedule(1000, DEFAULTS)
    schedule.budget.layer_factor = factor
    due = []
    for sequence in range(1, 900):
        if schedule.due(sequence) and sequence > 200:
            due.append(sequence)
        if sequence == step + noted_after:
            schedule.note_step(step, {"skipped": 0.0}, totals(nan=1).numpy())
    return due


def test_after_trouble_every_fifth_step_is_due_ten_times():
    assert due_after_trouble_at(301) == list(range(310, 360, 5))
    assert due_after_trouble_at(305) == list(range(310, 360, 5))
    assert due_after_trouble_at(306) == list(range(315, 365, 5))


def test_the_steps_between_the_samples_follow_trouble_too_and_no_others():
    schedule = LayerSchedule(1000, DEFAULTS)
    schedule.note_step(303, {"skipped": 1.0}, None)
    assert [step for step in range(900) if schedule.follows_trouble(step)] == list(range(310, 356))


def test_what_was_said_of_a_step_between_them_stays_so():
    schedule = LayerSchedule(1000, DEFAULTS)
    assert not schedule.follows_trouble(320)
    schedule.note_step(303, {"skipped": 1.0}, None)
    assert not schedule.follows_trouble(320)
    assert schedule.follows_trouble(321)


@pytest.mark.parametrize("late", [1, 4])
def test_ranks_that_learn_of_trouble_a_few_steps_later_agree(late):
    assert due_after_trouble_at(303, noted_after=late) == due_after_trouble_at(303)


def test_a_rank_that_learns_of_it_too_late_has_the_rest_in_common():
    assert due_after_trouble_at(303, noted_after=20) == list(range(325, 360, 5))


def test_within_the_overhead_budget_the_interval_is_longer_and_its_steps_are_common():
    assert due_after_trouble_at(303, factor=4) == [320, 340]
    assert due_after_trouble_at(303, factor=16) == [320]


def test_what_was_said_of_a_step_stays_so():
    schedule = LayerSchedule(1000, DEFAULTS)
    asked = [schedule.due(sequence) for sequence in range(1, 321)]
    schedule.note_step(303, {"skipped": 1.0}, None)
    assert [schedule.due(sequence) for sequence in range(1, 321)] == asked
    assert schedule.due(325)


@each(
    ("scalars", "values", "dense"),
    [
        ({"skipped": 1.0}, None, True),
        ({"guard_skip_update": 1.0}, None, True),
        ({"guard_skip_update": 0.5}, None, True),
        ({"guard_skip_update": 0.0}, totals(), False),
        ({"clip_norm": nan}, totals(), True),
        ({"clip_norm": inf}, None, True),
        ({"skipped": 0.0}, totals(inf=2), True),
        ({"skipped": 0.0, "clip_norm": 3.0, "loss": nan}, totals(squares=1e300), False),
        ({}, torch.full((2, 6), nan), False),
        ({}, None, False),
    ],
)
def test_only_what_all_ranks_know_alike_makes_it_denser(scalars, values, dense):
    schedule = LayerSchedule(1000, DEFAULTS)
    schedule.note_step(301, scalars, None if values is None else values.numpy())
    assert schedule.due(310) == dense


def test_trouble_that_three_early_samples_follow_changes_nothing():
    schedule = LayerSchedule(1000, DEFAULTS)
    schedule.note_step(70, {"skipped": 1.0}, None)
    assert not schedule.due(75)
    schedule.note_step(71, {"skipped": 1.0}, None)
    assert schedule.due(85)


@pytest.mark.parametrize(
    ("before", "share", "dense"),
    [
        ([0.0], 0.02, True),
        ([0.0], 0.009, False),
        ([0.5, 0.8, 0.6], 1.0, False),
        ([0.5, 0.51], 0.7, True),
        ([0.5], 0.1, False),
    ],
)
def test_gradients_that_are_more_often_zero_than_before_make_it_denser(before, share, dense):
    schedule = LayerSchedule(1000, DEFAULTS)
    for step in range(101, 301):
        schedule.note_step(step, {}, zeros(before[step % len(before)]))
    schedule.note_step(301, {}, zeros(share))
    assert schedule.due(310) == dense


def zeros(share: float, elements: float = 1000):
    return torch.tensor([[1.0, 1, elements * share, 0, 0, elements]]).numpy()


@pytest.mark.parametrize(
    ("before", "elements", "dense"),
    [([1000], 900, True), ([1000], 995, False), ([1000, 400], 400, False), ([400], 1000, False)],
)
def test_fewer_elements_than_before_make_it_denser_as_zeros_do(before, elements, dense):
    schedule = LayerSchedule(1000, DEFAULTS)
    for step in range(101, 301):
        schedule.note_step(step, {}, zeros(0.0, before[step % len(before)]))
    schedule.note_step(301, {}, zeros(0.0, elements))
    assert schedule.due(310) == dense


def test_lasting_trouble_costs_ten_samples_in_five_hundred_steps():
    schedule = LayerSchedule(100_000, DEFAULTS)
    due = []
    for sequence in range(1, 2001):
        if schedule.due(sequence) and sequence >= 80:
            due.append(sequence)
        schedule.note_step(sequence, {"skipped": 1.0}, None)
    begins = [80, 580, 1080, 1580]
    assert due == [begin + 5 * sample for begin in begins for sample in range(10)]


def test_ranks_with_other_intervals_number_their_looks_at_a_few_weights_alike():
    schedules = [LayerSchedule(100, DEFAULTS) for _ in range(2)]
    schedules[1].budget.layer_factor = 4
    looks = [
        {step: number for step in range(1, 1000) if (number := each.compares_few(step)) is not None}
        for each in schedules
    ]
    assert list(looks[0])[:5] == [32, 64, 96, 128, 160]
    assert 800 not in looks[0], "all weights are compared there"
    assert set(looks[1]) >= {128, 256, 384}
    assert all(looks[0][step] == number for step, number in looks[1].items() if step in looks[0])
