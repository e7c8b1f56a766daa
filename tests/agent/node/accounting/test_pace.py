from statistics import median

import pytest

from mp_agent.node.accounting.ranks import Pace, Standstill


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


@pytest.fixture
def standstill() -> Standstill:
    """A run that made its first step at 100 s."""
    made = Standstill()
    made.update("a", 0, "starting", 0.0)
    made.update("a", 1, "forward", 100.0)
    return made


def test_it_grows_until_the_next_step(standstill: Standstill):
    standstill.update("a", 1, "backward", 130.0)
    assert standstill.seconds(150.0) == 50.0
    standstill.update("a", 2, "forward", 150.0)
    assert standstill.seconds(151.0) == 1.0


@pytest.mark.parametrize("phase", ["eval", "checkpoint", "starting"])
def test_going_to_another_kind_of_phase_and_back_starts_over(standstill: Standstill, phase: str):
    standstill.update("a", 1, phase, 200.0)
    assert standstill.seconds(260.0) == 60.0
    standstill.update("a", 1, "forward", 300.0)
    assert standstill.seconds(310.0) == 10.0


def test_only_pauses_in_training_that_ended_are_remembered(standstill: Standstill):
    standstill.update("a", 2, "forward", 700.0)
    assert standstill.longest_pause_seconds(700.0) == 600.0
    standstill.update("a", 2, "eval", 710.0)
    standstill.update("a", 2, "forward", 9000.0)
    assert standstill.seconds(20_000.0) == 11_000.0
    assert standstill.longest_pause_seconds(700.0) == 600.0


def test_each_phase_outside_training_has_a_longest_of_its_own(standstill: Standstill):
    standstill.update("a", 1, "eval", 200.0)
    assert standstill.longest_phase_seconds(250.0) is None
    standstill.update("a", 1, "forward", 320.0)
    standstill.update("a", 2, "checkpoint", 330.0)
    assert standstill.longest_phase_seconds(340.0) is None
    standstill.update("a", 2, "forward", 350.0)
    assert standstill.longest_phase_seconds(350.0) is None
    standstill.update("a", 3, "eval", 360.0)
    assert standstill.longest_phase_seconds(360.0) == pytest.approx(120.0, rel=0.01)
    assert standstill.longest_pause_seconds(360.0) == pytest.approx(100.0, rel=0.01)


def test_an_evaluation_before_the_first_step_says_nothing_of_later_ones():
    made = Standstill()
    made.update("a", 0, "eval", 0.0)
    made.update("a", 0, "forward", 2.0)
    made.update("a", 1, "forward", 10.0)
    made.update("a", 1, "eval", 20.0)
    assert made.longest_phase_seconds(900.0) is None


def test_phases_of_many_names_are_not_all_remembered(standstill: Standstill):
    for number in range(100):
        standstill.update("a", 1, f"phase-{number}", 200.0 + number)
    assert standstill.longest_phase_seconds(300.0) is None


def test_neither_the_first_step_nor_what_a_restart_ended_is_a_pause(standstill: Standstill):
    assert standstill.longest_pause_seconds(100.0) == 0.0
    standstill.update("b", 0, "starting", 5000.0)
    assert standstill.longest_pause_seconds(5000.0) == 0.0
    assert standstill.seconds(5001.0) == 1.0


def test_a_pause_fades(standstill: Standstill):
    standstill.update("a", 2, "forward", 700.0)
    assert standstill.longest_pause_seconds(700.0 + 12 * 3600) == pytest.approx(300.0)
    standstill.update("a", 3, "forward", 710.0)
    assert standstill.longest_pause_seconds(710.0) == pytest.approx(600.0, rel=0.01)


def test_before_the_first_look_nothing_is_known():
    assert Standstill().seconds(5.0) is None
