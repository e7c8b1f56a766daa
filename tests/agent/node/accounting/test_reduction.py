"""Copies whose gradients no collective reduces, against local SGD, which averages them."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.ranks import ReductionTracker
from mp_agent.node.accounting.tracker import AccountContext
from mp_agent.records.merged import Reduction
from tests.agent.node.builders import merged_step

LIMIT = int(resolve({})["unreduced_steps"])

REDUCED = Reduction(reduced=True, claimed=True)
LOCAL = Reduction(reduced=False, everywhere=True)
PLAIN = Reduction(reduced=False, everywhere=True, wrapped=False)
AVERAGED = Reduction(reduced=False, everywhere=True, equal_before=True)
BYPASSED = Reduction(reduced=False, everywhere=True, claimed=True)
LOST = Reduction(reduced=True, everywhere=True, claimed=True)
LEFT_OUT = Reduction(reduced=False, wrapped=False, measured=False)
LEFT_OUT_EQUAL = replace(LEFT_OUT, equal_before=True)


def found(steps: Iterable[Reduction | None], tracker: ReductionTracker | None = None) -> list[int]:
    """Return the steps, by number, on which gradients are said not to be reduced."""
    progress = Progress()
    tracker = tracker or progress.reduction
    context = AccountContext(resolve({}), 60.0, progress)
    numbers = []
    for number, reduction in enumerate(steps, 1):
        tracker.observe(replace(merged_step(number), reduction=reduction), context)
        if tracker.unreduced:
            numbers.append(number)
    return numbers


def test_replicas_that_never_average_are_found_after_the_limit():
    assert found([AVERAGED, *[LOCAL] * (LIMIT - 1)]) == [LIMIT]


def test_the_count_begins_with_the_update_that_left_equal_copies_different():
    progress = Progress()
    context = AccountContext(resolve({}), 60.0, progress)
    for number, reduction in enumerate([REDUCED, AVERAGED, *[LOCAL] * LIMIT], 1):
        progress.reduction.observe(replace(merged_step(number), reduction=reduction), context)
    assert progress.reduction.unreduced
    assert progress.reduction.steps == LIMIT + 1


def test_plain_copies_get_more_time():
    assert found([PLAIN] * 8 * LIMIT) == [8 * LIMIT]


@pytest.mark.parametrize("period", [2, 8, LIMIT - 1])
def test_local_sgd_stays_silent(period):
    assert found(([LOCAL] * (period - 1) + [AVERAGED]) * 5) == []


def test_a_period_that_was_seen_to_end_explains_up_to_four_times_as_many_steps():
    period = 60
    steps = [*[LOCAL] * period, AVERAGED, *[LOCAL] * (4 * period - 1)]
    assert found(steps) == [len(steps)]


def test_a_later_attempt_remembers_the_period():
    tracker = ReductionTracker()
    assert found([*[LOCAL] * 60, AVERAGED], tracker) == []
    assert found([LOCAL] * 100, tracker.next_attempt()) == []


def test_a_wrapper_that_the_first_steps_contradict_is_found_at_the_second():
    assert found([BYPASSED] * 3) == [2, 3]
    assert found([replace(BYPASSED, equal_before=True), *[BYPASSED] * 2]) == [2, 3]


def test_a_wrapper_whose_replicas_are_equal_all_the_same_is_not_contradicted():
    assert found([replace(BYPASSED, equal_before=True)] * 5) == []


def test_a_wrapper_that_is_contradicted_later_is_found_on_the_third_step_in_a_row():
    assert found([REDUCED, LOST, LOST, LOST, REDUCED]) == [4]
    assert found([REDUCED, LOST, LOST, REDUCED, LOST, LOST]) == []


def test_steps_that_show_nothing_change_nothing():
    steps = [*[LOCAL] * (LIMIT - 1), None, None, LOCAL]
    assert found(steps) == [len(steps)]


def test_steps_between_two_measured_ones_count():
    steps = [*[LEFT_OUT] * 63, PLAIN] * 8
    assert found(steps) == [8 * LIMIT]
    assert found([*steps[:-1], LEFT_OUT]) == []


def test_the_count_reaches_up_to_the_newest_step_so_that_its_beginning_is_known():
    tracker = ReductionTracker()
    assert found([*[LOCAL] * LIMIT, *[LEFT_OUT] * 5], tracker)
    assert tracker.unreduced_steps == LIMIT + 5
    assert found([LEFT_OUT_EQUAL], tracker) == []
    assert tracker.unreduced_steps == 0


def test_an_averaging_between_two_measured_steps_is_seen():
    assert found([*[LEFT_OUT] * 6, LEFT_OUT_EQUAL, PLAIN] * 2 * LIMIT) == []
    assert found([*[LEFT_OUT] * 31, LOCAL, LEFT_OUT_EQUAL] * LIMIT) == []


def test_a_wrapper_is_not_contradicted_by_steps_that_are_not_measured():
    assert found([REDUCED, LOST, *[LEFT_OUT] * 5, LOST]) == []


def test_a_skipped_step_is_no_update():
    progress = Progress()
    context = AccountContext(resolve({}), 60.0, progress)
    for number in range(1, 2 * LIMIT):
        step = replace(merged_step(number, skipped=1.0), reduction=LOCAL)
        progress.reduction.observe(step, context)
    assert progress.reduction.steps == 0


def test_a_period_is_known_at_its_full_length_where_few_of_its_steps_are_measured():
    tracker = ReductionTracker()
    assert found([*[LEFT_OUT] * 40, PLAIN, *[LEFT_OUT] * 59, AVERAGED], tracker) == []
    assert tracker.longest == 100
