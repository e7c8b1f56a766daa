from mp_agent.exporters.otlp.stale_series import StartTimes
from tests.exporters.otlp.samples import DURATION, LOSS, STEPS, duration, family, snapshot, steps

KEY = (STEPS.name, ("llama",))


def test_a_counter_that_only_rises_was_never_reset():
    starts = StartTimes()
    assert [dict(starts.follow(steps(n), t)) for t, n in enumerate([0.0, 3.0, 3.0, 9.0])] == [
        {}
    ] * 4


def test_a_counter_that_fell_was_reset_after_the_snapshot_before():
    starts = StartTimes()
    for time, count in ((10, 5.0), (20, 6.0), (30, 1.0)):
        restarts = starts.follow(steps(count), time)
    assert restarts == {KEY: 20}
    assert starts.follow(steps(2.0), 40) == {KEY: 20}
    assert starts.follow(steps(0.0), 50) == {KEY: 40}


def test_a_histogram_falls_by_its_count():
    starts = StartTimes()
    starts.follow(snapshot(family(DURATION, (("llama",), duration(2, 2)))), 10)
    restarts = starts.follow(snapshot(family(DURATION, (("llama",), duration(3)))), 20)
    assert restarts == {(DURATION.name, ("llama",)): 10}


def test_gauges_may_fall_and_what_is_gone_is_forgotten():
    starts = StartTimes()
    starts.follow(snapshot(family(LOSS, (("llama",), 2.0)), *steps(5.0).families), 10)
    assert set(
        starts.follow(snapshot(family(LOSS, (("llama",), 1.0)), *steps(1.0).families), 20)
    ) == {KEY}
    assert starts.follow(snapshot(), 30) == {}
    assert starts.follow(steps(0.0), 40) == {}
