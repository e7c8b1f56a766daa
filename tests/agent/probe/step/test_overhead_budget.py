"""What is measured less, and when, to stay within a share of the step time."""

from math import nan

import pytest

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.probe.step.layer_schedule import WINDOW_STEPS, LayerSchedule, OverheadBudget
from tests.subtests import each


def windows(budget: OverheadBudget, count: int, *, host: float = 0.0, device: float = 0.0) -> None:
    """Make steps of 1 s, of which the probe takes so much."""
    for _ in range(count * WINDOW_STEPS):
        budget.note_device_seconds(device)
        budget.note_step(1.0, host)


def steps_with_layers(
    budget: OverheadBudget, count: int, *, each: float, layers: float, interval: int = 100
) -> list[tuple[int, int, float]]:
    """Make steps of 1 s, measured as the budget says; return its factors and what each cost."""
    schedule = LayerSchedule(interval, DEFAULTS, budget)
    seen = []
    for number in range(1, count + 1):
        cost = each * schedule.measures(number) + layers * schedule.due(number)
        seen.append((budget.layer_factor, budget.stride, cost))
        budget.note_step(1.0, cost, with_layers=schedule.due(number))
    return seen


def test_layer_samples_are_stretched_first_then_steps_are_left_out():
    budget = OverheadBudget(0.01)
    seen = []
    for _ in range(22):
        windows(budget, 1, device=0.03)
        seen.append((budget.layer_factor, budget.stride))
    factors = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (16, 2), (16, 4), (16, 8), (16, 16)]
    assert list(dict.fromkeys(seen)) == [*factors, (16, 32), (16, 64)]
    assert seen[-1] == (16, 64)


@each(("each", "stride"), [(0.011, 2), (0.019, 2), (0.03, 4), (0.1, 16), (0.5, 64), (5.0, 64)])
def test_what_each_step_costs_is_within_the_budget_after_three_windows(each, stride):
    """Rarer samples of layers would not help: none is waited for."""
    budget = OverheadBudget(0.01)
    seen = steps_with_layers(budget, 3 * WINDOW_STEPS + 1, each=each, layers=each)
    assert seen[-2][:2] == (1, 1)
    assert seen[-1][:2] == (16, stride)


def test_one_slow_window_leaves_out_no_step():
    """It may be the machine's: a sample of layers gets rarer at most."""
    budget = OverheadBudget(0.01)
    windows(budget, 3, host=0.005)
    windows(budget, 1, host=0.3)
    windows(budget, 20, host=0.005)
    assert budget.stride == 1


@pytest.mark.parametrize(
    ("each", "layers", "interval"),
    [(0.003, 1.0, 100), (0.003, 3.0, 100), (0.003, 10.0, 100), (0.0, 10.0, 500), (0.05, 0.5, 100)],
)
def test_what_costs_much_but_seldom_is_kept_within_the_budget(each, layers, interval):
    """A window without a sample of layers says nothing of what they cost."""
    budget = OverheadBudget(0.01, interval)
    seen = steps_with_layers(budget, 40_000, each=each, layers=layers, interval=interval)
    settled = seen[8_000:]
    assert len({(factor, stride) for factor, stride, _ in settled}) == 1
    assert sum(cost for *_, cost in settled) / len(settled) <= 0.01


def test_a_costly_sample_alone_stretches_its_interval_no_further_than_it_must():
    budget = OverheadBudget(0.01)
    steps_with_layers(budget, 20_000, each=0.003, layers=1.0)
    assert (budget.layer_factor, budget.stride) == (2, 1)


def test_within_the_budget_everything_is_measured():
    budget = OverheadBudget(0.01)
    windows(budget, 20, host=0.009, device=0.009)
    assert (budget.layer_factor, budget.stride) == (1, 1)
    assert budget.host_ratio == pytest.approx(0.009)
    assert budget.device_ratio == pytest.approx(0.009)


def test_the_first_window_with_its_many_layer_samples_decides_nothing():
    budget = OverheadBudget(0.01)
    windows(budget, 1, host=0.5)
    windows(budget, 10, host=0.005)
    assert (budget.layer_factor, budget.stride) == (1, 1)


def test_no_limit_is_no_limit():
    budget = OverheadBudget(1.0)
    windows(budget, 10, host=0.9)
    assert (budget.layer_factor, budget.stride) == (1, 1)


def test_more_is_measured_again_after_calm_windows_in_the_opposite_order():
    """As many as span an interval of layer samples, four at least."""
    budget = OverheadBudget(0.01)
    windows(budget, 10, device=0.03)
    assert (budget.layer_factor, budget.stride) == (16, 2) == factors_after(budget, 15)
    assert factors_after(budget, 1) == (16, 1)
    assert factors_after(budget, 16) == (8, 1)
    assert factors_after(budget, 8) == (4, 1)
    assert factors_after(budget, 4) == (2, 1)
    assert factors_after(budget, 3) == (2, 1)
    assert factors_after(budget, 1) == (1, 1)


def factors_after(budget: OverheadBudget, count: int) -> tuple[int, int]:
    windows(budget, count, device=0.001)
    return budget.layer_factor, budget.stride


def test_a_cost_just_within_the_budget_does_not_swing_to_and_fro():
    """Doubling what is measured would go beyond it again."""
    budget = OverheadBudget(0.01)
    windows(budget, 10, device=0.03)
    windows(budget, 50, device=0.006)
    assert (budget.layer_factor, budget.stride) == (16, 2)


def test_steps_that_differ_a_hundredfold_are_judged_by_their_sum():
    """The short ones alone would be beyond the budget, though they take little of the time."""
    budget = OverheadBudget(0.01)
    for number in range(100 * WINDOW_STEPS):
        budget.note_step(1.0 if number % 100 else 100.0, 0.015)
    assert (budget.layer_factor, budget.stride) == (1, 1)


def test_device_time_that_comes_late_counts_where_it_comes():
    budget = OverheadBudget(0.01)
    for number in range(40 * WINDOW_STEPS):
        if number >= 150:
            budget.note_device_seconds(0.02)
        budget.note_step(1.0, 0.0)
    assert budget.stride > 1
    assert budget.device_ratio == pytest.approx(0.02)


def test_device_time_that_is_not_known_is_no_cost():
    budget = OverheadBudget(0.01)
    windows(budget, 3, host=0.001)
    assert budget.device_ratio is None


def test_a_step_of_unknown_length_is_left_out():
    budget = OverheadBudget(0.01)
    budget.note_step(nan, 5.0)
    windows(budget, 1, host=0.001)
    assert budget.host_ratio == pytest.approx(0.001)


def test_ranks_with_different_factors_have_the_steps_of_the_larger_in_common():
    less, more = OverheadBudget(0.01), OverheadBudget(0.01)
    windows(less, 16, device=0.03)
    windows(more, 10, device=0.03)
    assert less.stride > more.stride > 1
    schedules = [LayerSchedule(100, DEFAULTS, budget) for budget in (less, more)]
    measured = [{n for n in range(101, 5000) if each.measures(n)} for each in schedules]
    assert measured[0] < measured[1]
    due = [{n for n in range(101, 5000) if each.due(n)} for each in schedules]
    assert due[0] and due[0] <= measured[0]
