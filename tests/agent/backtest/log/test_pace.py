"""Steps and times: a log of every 500th step is not a step every 500 seconds."""

import pytest

from mp_agent.backtest.log.steps import pace_of
from mp_agent.backtest.log.training_log import Point
from tests.agent.backtest.builders import healthy_points, log_of


def pace(points, given=None, **facts):
    return pace_of(log_of(points, **facts), points, given)


def test_times_of_the_log_give_the_time_per_step() -> None:
    points = [Point(step=500 * n, loss=1.0, time_seconds=1000.0 + 250.0 * n) for n in range(1, 5)]
    found = pace(points)
    assert found.step_seconds == 0.5
    assert found.origin == "times in the log"
    assert list(found.times) == [1250.0, 1500.0, 1750.0, 2000.0]


def test_a_given_time_per_step_wins() -> None:
    points = [Point(step=10 * n, loss=1.0, time_seconds=float(n)) for n in range(1, 4)]
    found = pace(points, 2.0)
    assert [b - a for a, b in zip(found.times, found.times[1:], strict=False)] == [20.0, 20.0]


def test_without_any_time_a_second_per_step_is_assumed() -> None:
    found = pace(healthy_points(3, every=100))
    assert (found.step_seconds, found.origin) == (1.0, "assumed")
    assert found.times[2] - found.times[0] == 200.0


def test_the_total_time_of_the_run_counts_where_points_have_none() -> None:
    assert pace(healthy_points(3), step_seconds=0.25).step_seconds == 0.25


def test_step_times_of_points_add_up() -> None:
    points = [Point(step=10 * n, loss=1.0, step_seconds=3.0) for n in range(1, 4)]
    found = pace(points)
    assert found.times[2] - found.times[1] == 30.0


@pytest.mark.parametrize("times", [(100.0, 110.0, 20.0, 30.0), (100.0, 110.0, 110.0, 120.0)])
def test_time_never_goes_back_when_the_clock_does(times) -> None:
    points = [Point(step=n, loss=1.0, time_seconds=t) for n, t in enumerate(times, start=1)]
    found = pace(points).times
    assert list(found) == sorted(found)
