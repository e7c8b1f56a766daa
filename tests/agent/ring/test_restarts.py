from itertools import pairwise

from mp_agent.ring.run_files import HEALTHY_SECONDS, LONGEST_PAUSE_SECONDS, Restarts


def _starts(restarts: Restarts, begin: float, seconds: int) -> list[float]:
    """Return when an agent is started that dies at once, looked at every second."""
    return [begin + n for n in range(seconds) if restarts.may_start(begin + n)]


def test_pauses_grow_to_a_limit_and_it_never_gives_up():
    starts = _starts(Restarts(), 0.0, 3600)
    pauses = [late - early for early, late in pairwise(starts)]

    assert pauses[:4] == [2.0, 4.0, 8.0, 16.0]
    assert set(pauses[4:]) == {LONGEST_PAUSE_SECONDS}


def test_an_agent_that_stays_up_makes_up_for_the_deaths_before_it():
    restarts = Restarts()
    dying = _starts(restarts, 0.0, 100)
    assert restarts.deaths == len(dying) - 1

    for second in range(int(HEALTHY_SECONDS) + 1):
        restarts.saw_running(200.0 + second)
    assert restarts.deaths == 0
    again = _starts(restarts, 300.0, 10)
    assert again[:2] == [300.0, 304.0]


def test_an_agent_that_comes_and_goes_stays_under_suspicion():
    restarts = Restarts()
    for round_ in range(10):
        for second in range(int(HEALTHY_SECONDS) - 5):
            restarts.saw_running(round_ * 100.0 + second)
        assert restarts.may_start(round_ * 100.0 + 50)
    assert restarts.deaths == 10
