import pytest

from mp_agent.alerting.detector import readings as module
from mp_agent.alerting.detector.readings import Readings


def taken(*readings: dict[str, float], needed: tuple[str, ...] = ("a", "b")) -> Readings:
    """Take complete readings, a minute apart; series without labels."""
    found = Readings(period_seconds=5.0)
    for name in needed:
        found.need(name, 600.0)
    for index, values in enumerate(readings):
        found.update([((name, ()), value) for name, value in values.items()], index * 60.0)
    return found


def test_only_what_is_needed_is_remembered():
    found = taken({"a": 1.0, "c": 2.0})
    assert found.names == {"a", "b"}
    assert list(found.standing("a")) == [((), 1.0)]
    assert not found.series("c")


def test_what_a_complete_reading_lacks_has_ended():
    found = taken({"a": 1.0, "b": 1.0}, {"b": 2.0})
    assert not list(found.standing("a"))
    assert list(found.standing("b")) == [((), 2.0)]
    assert len(found.series("a")) == 1


def test_a_few_readings_end_nothing():
    found = taken({"a": 1.0, "b": 1.0})
    found.update_some([(("b", ()), 2.0)], 60.0)
    assert list(found.standing("a")) == [((), 1.0)]


def test_series_that_ended_long_ago_are_forgotten():
    found = taken({"a": 1.0}, *[{"b": 1.0}] * 12)
    assert not found.series("a")


def test_more_series_than_there_is_room_for_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "SERIES_MAX", 3)
    found = Readings(period_seconds=5.0)
    found.need("a", 600.0)
    found.update([(("a", (("layer", str(index)),)), 1.0) for index in range(5)], 0.0)
    assert len(found.series("a")) == 3
    assert found.left_out == 2


def test_what_was_known_before_is_where_a_series_begins():
    found = Readings(5.0, known_value=lambda name, labels, value: value - 1.0)
    found.need("a", 600.0)
    found.update([(("a", ()), 8.0)], 0.0)
    (history,) = found.series("a").values()
    assert history.standing_at(0.0).rise == 1.0


@pytest.mark.parametrize(("count", "first"), [(0.0, 12), (1.0, 12), (2.0, 11), (40.0, 1)])
def test_the_first_of_the_last_steps_is_none_beyond_the_last(count: float, first: int):
    found = taken()
    for step in (10, 11, 12):
        found.note_step(step)
    assert found.first_of(count, 12) == first
