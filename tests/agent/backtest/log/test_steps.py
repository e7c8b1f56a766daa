"""Points become merged steps: their numbers, their attempts, and whether they were skipped."""

from math import inf, isfinite, nan

from mp_agent.backtest.log.steps import course_of, update_skipped
from mp_agent.backtest.log.training_log import Point
from mp_agent.records.merged import MergedStep
from tests.agent.backtest.builders import healthy_points, log_of
from tests.subtests import each


def steps(points, **facts):
    return list(course_of(log_of(points, **facts)).steps())


def test_sequence_numbers_count_the_steps_between_two_points() -> None:
    found = steps(healthy_points(4, every=500))
    assert [step.item.sequence for step in found] == [500, 1000, 1500, 2000]
    assert [step.item.step for step in found] == [500, 1000, 1500, 2000]


def test_a_log_that_begins_late_is_an_attempt_from_there() -> None:
    points = [Point(step=90_000 + n, loss=1.0) for n in range(1, 4)]
    assert [step.item.sequence for step in steps(points)] == [1, 2, 3]


def test_steps_that_go_back_are_a_resumed_run() -> None:
    points = [*healthy_points(5), *healthy_points(4)]
    course = course_of(log_of(points))
    found = list(course.steps())
    assert [step.begins_attempt for step in found] == [*[False] * 5, True, *[False] * 3]
    assert found[5].item.sequence == 1
    assert "steps go back 1 time(s), taken as the run resumed at step 1" in course.notes
    times = [step.now_seconds for step in found]
    assert times == sorted(times)


def test_values_of_a_step_are_finite_and_their_absence_is_noted() -> None:
    points = [Point(step=1, loss=nan, grad_norm=inf), Point(step=2, loss=2.0, grad_norm=1e200)]
    first, second = (step.item for step in steps(points))
    assert first.columns["loss_nonfinite"] == 1.0
    assert "loss" not in first.columns and "sum_squares" not in first.gradients
    assert first.gradients["inf_elements"] == 1.0
    assert all(isfinite(v) for v in (*second.columns.values(), *second.gradients.values()))
    assert first.gradients_observed and second.gradients_observed


def test_a_point_without_a_norm_says_nothing_of_gradients() -> None:
    (step,) = steps([Point(step=1, loss=1.0)])
    assert not step.item.gradients_observed


@each(
    ("points", "skipped"),
    [
        # A scaler skips what is not finite.
        ([Point(step=1, loss=1.0, grad_norm=inf, loss_scale=1024.0)], True),
        # The losses that follow show that the weights were spared.
        ([Point(step=1, loss=1.0, grad_norm=nan), Point(step=2, loss=1.1)], True),
        # They show that the weights were hit.
        ([Point(step=1, loss=1.0, grad_norm=nan), Point(step=2, loss=nan)], False),
        (
            [Point(step=1, loss=1.0, grad_norm=nan), Point(step=2, loss=0.0, grad_norm=nan)],
            False,
        ),
        # The log says so itself.
        ([Point(step=1, loss=1.0, grad_norm=nan, skipped=False)], False),
        ([Point(step=1, loss=1.0, grad_norm=1.0)], False),
    ],
)
def test_whether_an_update_was_skipped_follows_from_the_log(points, skipped) -> None:
    assert update_skipped(points, 0) is skipped


def test_a_point_with_nothing_but_a_lower_scale_is_an_overflow() -> None:
    points = [Point(step=1, loss=1.0, loss_scale=2.0), Point(step=2, loss_scale=1.0)]
    assert update_skipped(points, 1)


def test_skipped_steps_between_two_points_are_played_one_by_one() -> None:
    points = [
        Point(step=100, loss=1.0, loss_scale=64.0),
        Point(step=200, loss=1.0, loss_scale=32.0, skipped_steps=3),
    ]
    found = steps(points)
    assert [step.item.skipped for step in found] == [False, True, True, True, False]
    sequences = [step.item.sequence for step in found]
    assert sequences == sorted(set(sequences)) and sequences[-1] == 200
    assert [step.now_seconds for step in found] == sorted(step.now_seconds for step in found)


def test_a_step_that_was_logged_and_skipped_counts_once() -> None:
    points = [Point(step=1, loss_scale=64.0), Point(step=2, loss_scale=64.0, skipped_steps=1)]
    assert [step.item.skipped for step in steps(points)] == [False, True]


def test_a_scale_of_one_throughout_is_none() -> None:
    course = course_of(log_of(healthy_points(3, loss_scale=1.0)))
    items = [step.item for step in course.steps()]
    assert all(isinstance(item, MergedStep) and item.loss_scale is None for item in items)
    assert "the loss scale is 1 throughout, so there is none" in course.notes


def test_a_scale_of_one_whose_steps_are_skipped_is_one_at_its_floor() -> None:
    points = [Point(step=n, loss_scale=1.0, skipped=True) for n in range(3)]
    course = course_of(log_of(points))
    items = [step.item for step in course.steps()]
    assert all(isinstance(item, MergedStep) and item.loss_scale == 1.0 for item in items)
