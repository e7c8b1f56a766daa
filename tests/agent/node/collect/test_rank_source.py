"""One rank's ring, read while its process lives, dies, or leaves it broken."""

import os

import pytest

from mp_agent.node.collect import rank_source
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import shown


def test_parameters_that_change_in_one_look_before_a_death_are_all_read(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank(layers=("a",))
    rank.steps(3)
    rank.layer_table(sum_squares=1.0)
    rank.new_schema("a", "b")
    rank.steps(2)
    rank.layer_table(sum_squares=9.0)
    rank.open_step()
    rank.kill()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["steps_total"] == 6
    assert values["layer_grad_norm{a}"] == 3.0
    assert values["layer_grad_norm{b}"] == 3.0
    assert values["records_dropped_total{0}"] == 0


@pytest.mark.parametrize(("changes", "kept"), [(12, True), (60, False)])
def test_all_changes_in_one_look_that_the_ring_keeps_are_read(
    start_rank: StartRank, open_run: OpenRun, changes: int, kept: bool
):
    """Of those that it has written over, the steps are counted, and as dropped as well."""
    rank = start_rank(layers=("a",))
    steps = 3
    for change in range(changes):
        rank.new_schema("a", *(f"b{change}",))
        rank.steps(steps)
    rank.end()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["steps_total"] == changes * steps
    dropped = values["records_dropped_total{0}"]
    assert dropped == 0 if kept else 0 < dropped < changes * steps
    assert dropped % steps == 0
    assert values["step"] == changes * steps


@pytest.mark.slow
def test_steps_that_were_made_before_anyone_looked_are_counted(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    rank.steps(3000)
    run = open_run()
    run.poll(0.0)
    rank.steps(5)
    run.poll(0.0)
    values = shown(run)
    assert values["steps_total"] == 3005
    assert values["records_dropped_total{0}"] == 3000 - 1024


def test_changes_that_remain_are_read_at_the_next_look(
    start_rank: StartRank, open_run: OpenRun, monkeypatch
):
    monkeypatch.setattr(rank_source, "_SCHEMAS_PER_POLL", 4)
    rank = start_rank(layers=("a",))
    for change in range(10):
        rank.new_schema("a", f"b{change}")
        rank.steps()
    rank.kill()
    run = open_run()
    run.poll(0.0)
    assert shown(run)["run_active"] == 1
    for _ in range(3):
        run.poll(0.0)
    assert shown(run)["steps_total"] == 10
    assert shown(run)["run_end_info{killed}"] == 1


def test_a_killed_rank_ends_the_run_and_its_open_step_is_reported(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    run = open_run()
    rank.steps(4)
    rank.open_step(loss=7.0, gradients={"sum_squares": 2500.0})
    run.poll(0.0)
    assert shown(run)["steps_total"] == 4

    rank.kill()
    run.poll(0.0)
    values = shown(run)
    assert values["steps_total"] == 5
    assert values["grad_norm"] == 50.0
    assert values["run_active"] == 0
    assert values["run_end_info{killed}"] == 1
    assert values["rank_up{0}"] == 0


def test_an_interrupted_step_that_the_scaler_would_have_skipped_is_no_update(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    rank.steps()
    rank.open_step(loss_scale=65536.0, skipped=float("nan"), gradients={"inf_elements": 3.0})
    rank.kill()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["skipped_steps_total"] == 1
    assert values["nonfinite_updates_total"] == 0


def test_a_ring_that_is_truncated_while_it_is_read_ends_its_rank_alone(
    start_rank: StartRank, open_run: OpenRun, caplog
):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.steps()
    run = open_run()
    run.poll(0.0)
    os.truncate(ranks[1].path, 100)
    run.poll(0.0)
    ranks[0].steps()
    run.poll(0.0)

    values = shown(run)
    assert values["steps_total"] == 2
    assert values["rank_up{1}"] == 0
    assert values["rank_up{0}"] == 1
    assert "rank 1: its ring is abandoned" in caplog.text
