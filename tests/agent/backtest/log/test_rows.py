"""Rows of any logger become the same points, and what is wrong with a row is named."""

from math import inf, isnan

import pytest

from mp_agent.backtest.log.columns import choose_columns, number
from mp_agent.backtest.log.rows import NOTES_PER_LOG, Problems, numbered, points_of_rows
from mp_agent.errors import LogError, NothingToJudge
from tests.subtests import each


def points(rows, chosen=None):
    problems = Problems()
    return points_of_rows(numbered(rows), chosen or {}, problems)


@each(
    ("names", "expected"),
    [
        (("step", "loss", "grad_norm", "learning_rate"), ("step", "loss", "grad_norm")),
        (("_step", "train/loss", "train/grad_norm"), ("_step", "train/loss", "train/grad_norm")),
        (
            ("train/global_step", "_step", "train/loss", "gnorm"),
            ("train/global_step", "train/loss", "gnorm"),
        ),
        (("num_updates", "loss", "gnorm"), ("num_updates", "loss", "gnorm")),
        (("Iteration", "LM loss", "grad norm"), ("Iteration", "LM loss", "grad norm")),
        (("step", "train_loss_step", "grad_2.0_norm_total"),) * 2,
        (("step", "train_loss", "train_grad_norm"),) * 2,
        (("step", "epoch_loss", "grad_norm"),) * 2,
        (("step", "train_loss_epoch", "grad_norm"),) * 2,
        (
            (
                "training_iteration",
                "info/learner/default_policy/learner_stats/total_loss",
                "info/learner/default_policy/learner_stats/grad_norm",
            ),
        )
        * 2,
    ],
)
def test_columns_are_found_by_the_names_that_trainers_give_them(names, expected) -> None:
    found = choose_columns(names, {})
    assert tuple(found[quantity] for quantity in ("step", "loss", "grad_norm")) == expected


def test_losses_of_evaluations_are_no_losses_of_training() -> None:
    with pytest.raises(NothingToJudge, match="columns: step, eval_loss, val/loss"):
        choose_columns(("step", "eval_loss", "val/loss"), {})


def test_a_column_that_was_named_and_is_not_there_is_an_error() -> None:
    with pytest.raises(LogError, match="column 'ce' for loss is not there; columns: step, loss"):
        choose_columns(("step", "loss"), {"loss": "ce"})


@each(
    ("text", "value"),
    [("1.5", 1.5), ("Infinity", inf), ("-inf", -inf), ("1e400", inf), (10**400, inf), (True, 1.0)],
)
def test_numbers_are_read_however_they_are_written(text, value) -> None:
    assert number(text) == value


def test_nan_is_a_number_and_nothing_is_none() -> None:
    assert isnan(number("NaN") or 0.0)
    assert number("") is number(None) is number("null") is None


def test_the_parts_of_the_loss_of_a_detector_are_summed_and_that_is_noted() -> None:
    """As Ultralytics writes them, in a row, or in TensorBoard each in its own."""
    parts = {"train/box_loss": "1.5", "train/cls_loss": "0.5", "train/dfl_loss": "1.0"}
    whole, notes = points([{"epoch": "1", **parts, "val/box_loss": "9"}, {"epoch": "2", **parts}])
    assert [(point.step, point.loss) for point in whole] == [(1000, 3.0), (2000, 3.0)]
    note = "the loss is taken for the sum of train/box_loss, train/cls_loss, train/dfl_loss"
    assert note in notes
    apart, _ = points([{"step": s, name: parts[name]} for name in parts for s in (1, 2)])
    assert [(point.step, point.loss) for point in apart] == [(1, 3.0), (2, 3.0)]
    lost, _ = points([{"epoch": "1", **parts, "train/cls_loss": "nan"}])
    assert isnan(lost[0].loss or 0.0)


def test_of_parts_that_are_not_known_to_be_summed_there_is_no_loss() -> None:
    row = {"step": 1, "train/actor_loss": 1.0, "train/critic_loss": 2.0}
    with pytest.raises(NothingToJudge, match="columns: step, train/actor_loss"):
        points([row, {**row, "step": 2}])


def test_rows_of_one_step_become_one_point() -> None:
    (point,), notes = points([{"step": 3, "loss": 1.0}, {"step": 3, "grad_norm": 2.0}])
    assert (point.step, point.loss, point.grad_norm) == (3, 1.0, 2.0)
    assert notes == []


def test_of_a_step_that_was_logged_twice_the_last_row_counts_and_that_is_noted() -> None:
    (point,), notes = points([{"step": 3, "loss": 1.0}, {"step": 3, "loss": 4.0}])
    assert point.loss == 4.0
    assert "1 steps were logged more than once" in notes[0]


def test_rows_without_a_number_of_training_are_passed_over() -> None:
    found, _ = points([{"step": 1, "loss": 1.0}, {"step": 1, "eval_loss": 9.0}, {"step": 2}])
    assert [point.loss for point in found] == [1.0]


def test_a_value_that_is_no_number_is_named_with_its_line_and_the_others_stay() -> None:
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": "abc"}, {"step": 3, "loss": 2.0}]
    found, notes = points(rows)
    assert [point.step for point in found] == [1, 3]
    assert notes == ["line 2: loss has value 'abc', which is no number; it is left out"]


def test_many_wrong_lines_are_counted() -> None:
    rows = [{"step": n, "loss": "x"} for n in range(50)] + [{"step": 50, "loss": 1.0}]
    _, notes = points(rows)
    assert len(notes) == 6
    assert notes[-1] == "45 more lines are left out"


@each(
    ("unit", "more", "said"),
    [
        ("line", 1, "1 more line is left out"),
        ("log_history entry", 2, "2 more log_history entries are left out"),
    ],
)
def test_what_is_left_out_is_counted_in_its_own_unit(unit: str, more: int, said: str) -> None:
    problems = Problems(unit)
    for line in range(NOTES_PER_LOG + more):
        problems.add(line, "odd")
    assert problems.messages()[-1] == said


@pytest.mark.parametrize("step", [-1, 2**60, "9" * 10_000, float("nan"), float("inf")])
def test_an_impossible_step_is_named(step) -> None:
    found, notes = points([{"step": 1, "loss": 1.0}, {"step": step, "loss": 1.0}])
    assert len(found) == 1
    assert "step has value" in notes[0] and len(notes[0]) < 200


def test_without_a_step_rows_are_counted_and_that_is_noted() -> None:
    found, notes = points([{"loss": 1.0}, {"loss": 2.0}])
    assert [point.step for point in found] == [1, 2]
    assert "no column for the step" in notes[0]


def test_skips_are_counted_from_a_cumulative_column() -> None:
    rows = [{"step": s, "loss": 1.0, "skipped_steps": k} for s, k in ((10, 3), (20, 3), (30, 5))]
    found, _ = points(rows)
    assert [point.skipped_steps for point in found] == [0, 0, 2]


def test_skipped_steps_with_rows_of_their_own_stay_apart() -> None:
    rows = [
        {"step": 5, "loss": 1.0},
        {"step": 5, "loss_scale": 8.0, "skipped": 1},
        {"step": 5, "loss_scale": 4.0, "skipped": 1},
        {"step": 6, "loss": 1.0},
    ]
    found, _ = points(rows)
    assert [point.skipped for point in found] == [None, True, True, None]


def test_times_are_read_as_iso_dates_too() -> None:
    rows = [{"step": 1, "loss": 1.0, "timestamp": "2026-01-01T00:00:10+00:00"}]
    (point,), _ = points(rows)
    assert point.time_seconds == 1767225610.0


def test_the_time_since_the_start_is_read_where_it_is_written_as_a_time() -> None:
    rows = [
        {"current_steps": 10, "loss": 2.0, "elapsed_time": "0:00:32"},
        {"current_steps": 20, "loss": 2.0, "elapsed_time": "2 days, 3:46:16"},
        {"current_steps": 30, "loss": 2.0, "elapsed_time": 0.3},
        {"current_steps": 40, "loss": 2.0, "elapsed_time": "soon"},
    ]
    found, notes = points(rows)
    assert [point.time_seconds for point in found] == [32.0, 186_376.0, None, None]
    assert notes == []


def test_a_step_of_a_total_is_the_step() -> None:
    found, _ = points([{"global_step/max_steps": f"{n}/500", "loss": 2.0} for n in (5, 10)])
    assert [point.step for point in found] == [5, 10]


def test_a_table_of_runs_is_no_log_of_one() -> None:
    with pytest.raises(LogError, match="all rows hold step 5000"):
        points([{"Name": f"run-{n}", "iter": 5000, "train/loss": float(n)} for n in range(3)])


def test_of_many_columns_those_that_may_hold_a_loss_are_listed_first() -> None:
    names = [f"timing_s/part_{number}" for number in range(40)] + ["actor/pg_loss"]
    with pytest.raises(NothingToJudge, match="columns: actor/pg_loss, timing_s/part_0, "):
        choose_columns(names, {})


def test_a_column_that_goes_back_again_and_again_is_no_step_and_that_is_noted() -> None:
    """As the length of an episode."""
    rows = [{"steps": 2000 - 100 * (n % 3), "loss": float(n)} for n in range(12)]
    found, notes = points(rows)
    assert [point.step for point in found] == list(range(1, 13))
    assert "steps goes back 8 times in 12 rows, so it is not the run's step" in notes
    resumed, _ = points([{"step": n % 30, "loss": 1.0} for n in range(90)])
    assert resumed[-1].step == 29
    named, _ = points(rows, {"step": "steps"})
    assert named[1].step == 1900


def test_losses_that_are_empty_to_the_end_are_named_for_they_may_be_nan():
    losses = [2.0 - step / 100 for step in range(50)] + [None] * 20
    _, notes = points([{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    assert any("loss is empty in the last 20 rows" in note for note in notes)


@pytest.mark.parametrize("length", [50, 59])
def test_losses_of_every_tenth_row_end_like_any_other_gap(length):
    rows = [{"step": step, "loss": None if step % 10 else 2.0} for step in range(length)]
    _, notes = points(rows)
    assert not any("is empty" in note for note in notes)


def test_rows_whose_newest_is_first_are_read_from_the_end():
    rows = [{"step": step, "loss": 2.0 - step / 100} for step in range(50)]
    found, notes = points(rows[::-1])
    assert found == points(rows)[0]
    assert any("read from its end" in note for note in notes)
