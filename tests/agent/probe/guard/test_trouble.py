"""When trouble sets a policy off."""

from mp_agent.probe.guard.slow_policies import ObservedUpdate, TroubleTrigger


def _trigger(**values: float) -> TroubleTrigger:
    defaults = {"troubles": 2.0, "trouble_steps": 3.0, "actions_max": 2.0, "window_steps": 20.0}
    return TroubleTrigger({**defaults, **values})


def _set_off(trigger: TroubleTrigger, course: str) -> list[int]:
    """The steps on which it is set off; x is trouble."""
    return [i for i, mark in enumerate(course) if trigger.observe(ObservedUpdate(mark == "x"))]


def test_enough_troubles_within_the_steps_set_it_off():
    assert _set_off(_trigger(), "..x.x...") == [4]
    assert _set_off(_trigger(), "..x..x..") == []


def test_each_trouble_counts_once():
    assert _set_off(_trigger(), "xxx.....") == [1]
    assert _set_off(_trigger(), "xxxx....") == [1, 3]


def test_updates_of_one_step_count_as_one():
    trigger = _trigger()
    joint = [(True, True), (True, False), (False, True), (True, False)]
    assert [trigger.observe(ObservedUpdate(*each)) for each in joint] == [False] * 3 + [True]


def test_it_acts_no_more_often_than_the_window_allows():
    trigger = _trigger()
    assert _set_off(trigger, "xxxxxx") == [1, 3]
    assert trigger.is_none_left
    assert _set_off(trigger, "." * 20 + "xx") == [21]


def test_what_is_urgent_sets_it_off_at_once_also_after_other_trouble_of_its_step():
    trigger = _trigger(troubles=5.0)
    course = [(True, True, False), (True, False, True), (True, True, False)]
    assert [trigger.observe(ObservedUpdate(*each)) for each in course] == [False, True, False]
