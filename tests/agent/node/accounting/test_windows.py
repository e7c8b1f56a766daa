from statistics import pstdev
from sys import float_info

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mp_agent.node.accounting.windows import (
    LARGEST,
    ValueWindow,
    mean,
    scatter_around_trend,
    standard_deviation,
)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=40))
@example([2.5] * 7)
@example([0.0, -0.0])
@example([5e-324, 0.0, 0.0])
def test_the_standard_deviation_is_that_of_statistics(values):
    largest = max(map(abs, values))
    expected = pstdev(values)
    assert standard_deviation(values) == pytest.approx(expected, rel=1e-9, abs=1e-15 * largest)


def test_a_standard_deviation_at_the_ends_of_float64():
    most = float_info.max
    assert standard_deviation([most, -most]) == most
    assert standard_deviation([most] * 3) == 0.0
    assert standard_deviation([most, 0.0, 0.0]) == pytest.approx(most / 3 * 2**0.5)


def test_the_scatter_around_a_trend_is_that_of_what_is_left_without_it():
    wave = [(-1.0) ** index for index in range(32)]
    assert scatter_around_trend([3.0 * index for index in range(32)], 32) == pytest.approx(0.0)
    slanting = [100.0 - 3.0 * index + each for index, each in enumerate(wave)]
    assert scatter_around_trend(slanting, 32) == pytest.approx(1.0, rel=0.2)


def test_the_scatter_around_a_trend_is_a_number_at_the_ends_of_float64():
    most = float_info.max
    for values in ([-most] * 20 + [most] * 20, [most, -most] * 20, [most] * 40):
        assert 0.0 <= scatter_around_trend(values, 32) <= most


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.floats(0, 1e6)),
        min_size=1,
        max_size=60,
    )
)
def test_extremes_equal_those_of_a_plain_list_up_to_one_period(gaps_and_values):
    window = ValueWindow(120.0)
    now, history = 0.0, []
    for gap, value in gaps_and_values:
        now += gap
        window.add(value, now)
        history.append((now, value))
    inside = [value for time, value in history if now - time <= 120.0]

    assert window.extremes(now) == (max(inside), min(inside))


def test_an_excursion_leaves_the_window_with_its_time():
    window = ValueWindow(120.0)
    window.add(5000.0, 0.0)
    window.add(1.0, 10.0)

    assert window.extremes(110.0) == (5000.0, 1.0)
    assert window.extremes(125.0) == (1.0, 1.0)


def test_the_last_value_stays_however_long_a_step_takes():
    window = ValueWindow(120.0)
    window.add(3.0, 0.0)

    assert window.extremes(10_000.0) == (3.0, 3.0)


def test_a_clock_that_jumps_back_loses_nothing():
    window = ValueWindow(120.0)
    window.add(3.0, 1000.0)
    window.add(7.0, 900.0)

    assert window.extremes(1000.0) == (7.0, 3.0)


def test_an_excursion_leaves_the_window_although_the_clock_was_set_back_by_days():
    window = ValueWindow(120.0)
    window.add(5000.0, 1_000_000.0)
    window.add(2.0, 1_000_060.0)
    window.add(1.0, 10.0)

    assert window.extremes(10.0) == (5000.0, 1.0)
    window.add(1.0, 100.0)
    assert window.extremes(100.0) == (2.0, 1.0)


def test_memory_does_not_grow_with_the_step_rate():
    window = ValueWindow(120.0)
    for step in range(100_000):
        window.add(float(step), step * 0.01)

    assert len(window.buckets) <= 122


def test_without_values_there_are_no_extremes():
    assert ValueWindow(120.0).extremes(0.0) is None


def test_the_mean_of_the_largest_numbers_is_a_number():
    assert mean([LARGEST] * 128) == LARGEST
    assert mean([LARGEST, -LARGEST]) == 0.0
    assert mean([1.0, 2.0, 6.0]) == pytest.approx(3.0)
