from statistics import median

import pytest

from mp_agent.node.accounting.pace import Pace


def usual(*seconds: float | None) -> float | None:
    pace = Pace()
    for value in seconds:
        pace.fold(value)
    return pace.usual_seconds


def test_a_compilation_and_a_checkpoint_weigh_nothing():
    assert usual(480.0, *[1.0] * 20, 240.0, *[1.0] * 20) == 1.0


def test_it_follows_a_change_of_pace():
    times = [1.0] * 100 + [3.0] * 40

    assert usual(*times) == median(times[-64:]) == 3.0


@pytest.mark.parametrize(("seconds", "expected"), [((), None), ((None,), None), ((2.0,), 2.0)])
def test_before_the_first_step_nothing_is_usual(seconds, expected):
    assert usual(*seconds) == expected


def test_memory_is_bounded():
    pace = Pace()
    for step in range(1000):
        pace.fold(float(step))

    assert len(pace.seconds) == 64
