"""Rows of evaluations, iterations within epochs, and whole epochs."""

from math import nan

from mp_agent.backtest.log.rows import Problems, numbered, points_of_rows


def points(rows):
    return points_of_rows(numbered(rows), {}, Problems())


def test_rows_of_evaluations_are_left_out_and_that_is_noted() -> None:
    found, notes = points(
        [
            {"mode": "train", "step": 10, "loss": 2.0},
            {"mode": "val", "step": 10, "loss": 9.0},
            {"mode": "train", "step": 20, "loss": 1.0},
        ]
    )
    assert [point.loss for point in found] == [2.0, 1.0]
    assert notes == ["1 rows of evaluations are left out"]


def test_iterations_that_restart_in_each_epoch_are_steps_across_epochs() -> None:
    places = [(epoch, iteration) for epoch in (1, 2, 3) for iteration in (50, 100)]
    found, notes = points([{"epoch": e, "iter": i, "loss": 2.0} for e, i in places])
    assert [point.step for point in found] == [50, 100, 150, 200, 250, 300]
    assert notes == ["steps are (epoch - 1) × 100 + iter, which restarts in each epoch"]


def test_iterations_from_0_are_followed_by_those_that_were_not_logged() -> None:
    places = [(epoch, iteration) for epoch in (0, 1) for iteration in (0, 50, 100)]
    found, _ = points([{"epoch": e, "iter": i, "loss": 2.0} for e, i in places])
    assert [point.step for point in found] == [0, 50, 100, 150, 200, 250]


def test_steps_that_go_on_over_epochs_stay_as_they_are() -> None:
    places = [(1, 100), (1, 200), (2, 300), (3, 400), (2, 250)]
    found, notes = points([{"epoch": e, "step": s, "loss": 2.0} for e, s in places])
    assert [point.step for point in found] == [100, 200, 300, 400, 250]
    assert notes == []


def test_a_nan_mean_of_an_epoch_is_one_skipped_step_among_many() -> None:
    rows = [
        {
            "epoch": epoch,
            "train_loss": 6.9 if epoch < 4 else nan,
            "train_grad_norm": nan if epoch in (2, 4) else 0.4,
            "train_loss_scale": 65536.0,
        }
        for epoch in range(5)
    ]
    found, notes = points(rows)
    assert [point.step for point in found] == [0, 1000, 2000, 3000, 4000]
    assert [point.skipped_steps for point in found] == [0, 0, 1, 0, 0]
    assert found[2].grad_norm is None and found[1].grad_norm == 0.4
    assert found[4].grad_norm is not None, "where the loss is lost too, the norm counts"
    assert notes[0] == "no column for the step: each epoch is taken for 1000 steps"
    assert notes[1].startswith("1 epochs have a NaN gradient norm and a finite loss")


def test_epochs_as_fractions_are_no_steps() -> None:
    _, notes = points([{"epoch": epoch / 3, "loss": 2.0} for epoch in range(7)])
    assert notes == ["no column for the step: rows are counted as steps, from 1"]


def test_a_loss_scale_may_be_logged_as_its_logarithm() -> None:
    found, _ = points([{"step": i, "lg_loss_scale": v} for i, v in ((1, 20.0), (2, 1e9))])
    assert [point.loss_scale for point in found] == [2.0**20, None]


def test_a_row_per_epoch_is_1000_steps_of_a_restarted_run_too() -> None:
    found, notes = points([{"epoch": epoch, "train_loss": 2.0} for epoch in (0, 1, 2, 0, 1)])
    assert [point.step for point in found] == [0, 1000, 2000, 0, 1000]
    assert notes == ["no column for the step: each epoch is taken for 1000 steps"]


def test_rows_of_a_set_for_evaluations_are_left_out() -> None:
    found, _ = points([{"set": s, "step": 1, "loss": 2.0} for s in ("train", "valid")])
    assert len(found) == 1
