"""What a history remembers, against what a plain list of all readings says."""

from itertools import pairwise
from math import isclose, isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_agent.alerting.detector.history import RANGE_FUNCTIONS, History, Window

PERIOD = 5.0


def history_of(
    *readings: float | None, every: float = PERIOD, known_value: float | None = None
) -> History:
    """Take a reading every so many seconds; None: the series is not there."""
    history = History(PERIOD, 10_000.0, known_value)
    for index, value in enumerate(readings):
        if value is not None:
            history.add(value, index * every, index)
        elif history.alive:
            history.end()
    return history


def rise(history: History, start_seconds: float, end_seconds: float) -> float:
    return Window(history, start_seconds, end_seconds).rise()


class TestCounters:
    def test_increments_are_exact_within_a_period(self):
        history = history_of(*range(100), every=0.1)
        assert rise(history, -1.0, 9.9) == 99
        assert len(history.stretches) == 2

    def test_a_reset_counts_from_0(self):
        assert rise(history_of(5, 7, 2, 3), 0.0, 15.0) == 2 + 2 + 1

    def test_the_first_reading_counts_from_0_unless_it_was_known(self):
        assert rise(history_of(7, 8), -10.0, 5.0) == 8
        assert rise(history_of(7, 8, known_value=5.0), -10.0, 5.0) == 3
        assert history_of(7, known_value=5.0).known(-100.0, -50.0)
        assert not history_of(7).known(-100.0, -50.0)

    def test_one_that_never_rose_is_at_zero_while_it_is_there(self):
        assert history_of(0.0, 0.0).at_zero
        assert not history_of(0.0, None).at_zero
        assert not history_of(0.0, None, 0.0).at_zero
        assert not history_of(0.0, 1.0).at_zero and not history_of(1.0, 0.0).at_zero

    def test_what_is_forgotten_does_not_come_back(self):
        history = History(PERIOD, 100.0)
        for index in range(5_000):
            history.add(float(index), index * PERIOD, 0)
        assert len(history.stretches) < 100
        assert rise(history, 24_900.0, 24_995.0) == 19
        assert not history.known(0.0, 20_000.0)


class TestMemory:
    def test_a_series_that_stands_costs_one_stretch(self):
        history = history_of(*[65536.0] * 1_000)
        assert len(history.stretches) == 1
        assert len(Window(history, 0.0, 5_000.0).values()) == 1_000

    def test_the_rate_of_readings_does_not_matter(self):
        slow, fast = History(PERIOD, 600.0), History(PERIOD, 600.0)
        for index in range(600):
            slow.add(float(index), float(index), index)
        for index in range(60_000):
            fast.add(float(index), index / 100, index)
        assert len(slow.stretches) == len(fast.stretches)

    def test_a_series_that_ended_expires(self):
        history = History(PERIOD, 100.0)
        history.add(1.0, 0.0, 0)
        assert not history.expired(1_000.0)
        history.end()
        assert not history.expired(100.0)
        assert history.expired(101.0)


class TestExtremes:
    def test_of_a_period_are_of_every_reading_in_it(self):
        history = history_of(2.0, 900.0, 0.5, 2.0, every=1.0)
        window = Window(history, 0.0, 5.0)
        assert RANGE_FUNCTIONS["max_over_time"](window) == 900.0
        assert RANGE_FUNCTIONS["min_over_time"](window) == 0.5
        assert window.values() == [2.0]

    def test_of_the_round_begin_with_its_first_reading(self):
        history = History(PERIOD, 100.0)
        for value, round_ in ((5.0, 0), (9.0, 0), (1.0, 0), (3.0, 1), (4.0, 1)):
            history.add(value, 0.0, round_)
        assert (history.low, history.high, history.value) == (3.0, 4.0, 4.0)

    def test_a_steady_stretch_is_not_widened_by_what_comes_after(self):
        history = History(PERIOD, 100.0)
        for index in range(5):
            history.add(2.0, index * PERIOD, 0)
        history.add(100.0, 4 * PERIOD + 1.0, 0)
        window = Window(history, 0.0, 3 * PERIOD)
        assert RANGE_FUNCTIONS["max_over_time"](window) == 2.0
        assert Window(history, 0.0, 30.0).values() == [2.0] * 4 + [100.0]


class TestThen:
    def test_the_past_value_is_the_one_that_stood(self):
        history = history_of(1.0, 2.0, None, 3.0)
        assert [history.at(t) for t in (-1.0, 0.0, 4.0, 5.0, 9.0, 15.0, 20.0)] == [
            None, 1.0, 1.0, 2.0, None, 3.0, 3.0,
        ]  # fmt: skip

    def test_a_series_that_ended_is_not_there(self):
        history = history_of(1.0, None)
        assert not history.alive
        assert not Window(history, 1.0, 100.0).seen
        assert Window(history, 0.0, 100.0).seen


_READINGS = st.lists(
    st.one_of(st.none(), st.integers(-3, 3).map(float)), min_size=1, max_size=60
)  # many repetitions, so that there are steady stretches


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(readings=_READINGS, start=st.integers(0, 59), length=st.integers(0, 59))
def test_one_reading_per_period_gives_what_the_samples_themselves_give(
    readings: list[float | None], start: int, length: int
):
    history = history_of(*readings)
    stop = start + length
    inside = [v for v in readings[start : stop + 1] if v is not None]
    window = Window(history, start * PERIOD, stop * PERIOD)
    assert window.values() == inside
    assert window.seen is bool(inside)
    if not inside:
        return
    assert RANGE_FUNCTIONS["max_over_time"](window) == max(inside)
    assert RANGE_FUNCTIONS["min_over_time"](window) == min(inside)
    assert RANGE_FUNCTIONS["last_over_time"](window) == inside[-1]
    mean = sum(inside) / len(inside)
    assert isclose(RANGE_FUNCTIONS["avg_over_time"](window), mean, abs_tol=1e-12)
    deviation = (sum((v - mean) ** 2 for v in inside) / len(inside)) ** 0.5
    assert isclose(RANGE_FUNCTIONS["stddev_over_time"](window), deviation, abs_tol=1e-12)


@settings(max_examples=300, deadline=None)
@given(
    readings=st.lists(st.integers(0, 3).map(float), min_size=1, max_size=60),
    start=st.integers(0, 59),
    length=st.integers(0, 59),
)
def test_changes_resets_and_increments_are_those_of_the_samples(
    readings: list[float], start: int, length: int
):
    history = history_of(*readings)
    inside = readings[start : start + length + 1]
    steps = list(pairwise(inside))
    window = Window(history, start * PERIOD, (start + length) * PERIOD)
    assert RANGE_FUNCTIONS["changes"](window) == sum(a != b for a, b in steps)
    assert RANGE_FUNCTIONS["resets"](window) == sum(b < a for a, b in steps)
    assert window.rise() == sum(b - a if b >= a else b for a, b in steps)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, 65504.0])
def test_equal_samples_have_exactly_their_mean_and_no_deviation(value: float):
    history = history_of(*[value] * 7, value * 2, *[value] * 11)
    for start, end in ((0, 6), (8, 18)):
        window = Window(history, start * PERIOD, end * PERIOD)
        assert RANGE_FUNCTIONS["avg_over_time"](window) == value
        assert RANGE_FUNCTIONS["stddev_over_time"](window) == 0.0


@pytest.mark.parametrize("values", [(1e308, -1e308, 1.7e308), (1e200, 3e200, -1e200)])
def test_samples_whose_squares_or_sum_lie_beyond_float64_have_a_mean_and_a_deviation(values):
    window = Window(history_of(*values), 0.0, 2 * PERIOD)
    for name in ("avg_over_time", "stddev_over_time"):
        assert not isnan(RANGE_FUNCTIONS[name](window))
