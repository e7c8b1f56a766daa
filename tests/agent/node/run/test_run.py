"""A run read from real rings that other processes write."""

import itertools
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.run_files import ConditionNews, conditions_path, encode_news, read_conditions
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import MERGE_DEADLINE_SECONDS, shown


def test_the_ranks_steps_are_merged_into_one_run(start_rank: StartRank, open_run: OpenRun):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    run = open_run()
    run.poll(0.0)
    ranks[0].steps(3, loss=1.0, gradients={"sum_squares": 4.0})
    ranks[1].steps(2, loss=3.0, gradients={"sum_squares": 4.0})
    run.poll(0.0)

    values = shown(run)
    assert values["steps_total"] == 2
    assert values["step"] == 2
    assert values["loss"] == 2.0
    assert values["grad_norm"] == 2.0
    assert values["coverage_ratio"] == 1.0
    assert values["rank_step{0}"] == 3
    assert values["rank_step{1}"] == 2
    assert values["run_active"] == 1
    assert values["run_info{0,ddp,2,1,fp16,,,2.13.0}"] == 1


def test_before_the_first_step_the_run_is_active_and_all_counters_stand_at_zero(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["run_active"] == 1
    assert values["steps_total"] == 0
    assert values["rank_up{0}"] == 1
    assert "step" not in values
    assert "grad_norm" not in values


def test_events_for_the_ranks_are_written_once_there_is_room(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank()
    run, news = open_run(), ConditionNews(epoch="root")
    in_the_way = conditions_path(run.run_dir)
    in_the_way.mkdir()
    run.conditions.adopt_from_root(encode_news(news))
    in_the_way.rmdir()
    run.poll(0.0)
    assert read_conditions(run.run_dir) == news


def test_at_the_end_no_rank_is_waited_for(start_rank: StartRank, open_run: OpenRun):
    rank = start_rank(0, world_size=2)
    rank.steps(3)
    run = open_run()
    run.poll(0.0)
    assert shown(run)["steps_total"] == 0, "the other rank has yet to appear"

    rank.end(EndReason.FAILED)
    run.poll(0.0)
    assert shown(run)["steps_total"] == 3
    assert shown(run)["coverage_ratio"] == 0.5


def test_of_many_missing_ranks_the_lowest_are_named(start_rank: StartRank, open_run: OpenRun):
    rank = start_rank(3, world_size=1000)
    rank.steps()
    run = open_run()
    run.poll(0.0)
    rank.end(EndReason.FAILED)
    run.poll(0.0)
    values = shown(run)
    assert values["coverage_ratio"] == 0.001
    assert values["ranks_missing"] == 999
    named = [name for name in values if name.startswith("missing_rank_info")]
    assert named == [f"missing_rank_info{{{rank}}}" for rank in range(65) if rank != 3]


def test_a_rank_that_hangs_costs_coverage_and_is_named(start_rank: StartRank, open_run: OpenRun):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.steps()
    ranks[0].steps()
    run = open_run()
    run.poll(0.0)
    assert shown(run)["steps_total"] == 1

    run.poll(MERGE_DEADLINE_SECONDS)
    values = shown(run)
    assert values["steps_total"] == 2
    assert values["coverage_ratio"] == 0.5
    assert values["missing_rank_info{1}"] == 1
    assert values["run_active"] == 1, "a hang is no end"


def test_records_that_come_after_the_deadline_are_counted_as_dropped(
    start_rank: StartRank, open_run: OpenRun
):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    ranks[0].steps()
    run = open_run()
    run.poll(0.0)
    run.poll(MERGE_DEADLINE_SECONDS)
    ranks[1].steps()
    run.poll(MERGE_DEADLINE_SECONDS)

    values = shown(run)
    assert values["records_dropped_total{0}"] == 1
    assert values["steps_total"] == 1


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ((EndReason.COMPLETED, EndReason.COMPLETED), "completed"),
        ((EndReason.FAILED, None), "failed"),
        ((None, EndReason.COMPLETED), "killed"),
    ],
)
def test_the_run_ends_as_its_gravest_rank(start_rank: StartRank, open_run: OpenRun, ends, reason):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    run = open_run()
    run.poll(0.0)
    for rank, end in zip(ranks, ends, strict=True):
        if end is not None:
            rank.end(end)
        else:
            rank.kill()
    run.poll(0.0)

    assert shown(run)[f"run_end_info{{{reason}}}"] == 1
    assert shown(run)["run_active"] == 0


def test_the_end_marker_is_the_end_while_the_process_waits_for_its_scrape(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    rank.steps(3)
    rank.end(EndReason.COMPLETED)
    run = open_run()
    run.poll(0.0)

    assert rank.running
    assert run.end is EndReason.COMPLETED
    assert shown(run)["steps_total"] == 3
    assert shown(run)["rank_up{0}"] == 0


def test_a_node_without_rank_0_shows_its_own_ranks_alone(start_rank: StartRank, open_run: OpenRun):
    start_rank(1, world_size=2, local_world_size=1, local_rank=0, node_rank=1).steps()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["rank_step{1}"] == 1
    assert "run_active" not in values
    assert values["build_info{1,0.1.0}"] == 1


def test_remove_leaves_no_ring(start_rank: StartRank, open_run: OpenRun):
    rank = start_rank()
    rank.kill()
    run = open_run()
    run.poll(0.0)
    run.remove_rings()

    assert locations.find_rings(run.run_dir) == []
    assert not run.has_new_rings()


def fails_once(function: Callable[..., Any], *, at: int = 2) -> Callable[..., Any]:
    """Return a function that raises at one of its calls."""
    calls = itertools.count(1)

    def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise ArithmeticError("once")
        return function(*arguments, **named)

    return called


@pytest.mark.parametrize(
    ("place", "lost"),
    [
        ("mp_agent.node.collect.attempt.reduce_step", 2),
        ("mp_agent.node.merge.run_steps.StepMerge.merged", 2),
        ("mp_agent.node.accounting.latest.OptimizerTracker.observe", 1),
    ],
)
def test_a_failure_of_ours_on_one_step_costs_that_step_which_is_counted_and_no_other(
    start_rank: StartRank, open_run: OpenRun, monkeypatch, caplog, place: str, lost: int
):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    run = open_run()
    run.poll(0.0)
    owner, name = place.rsplit(".", 1)
    monkeypatch.setattr(place, fails_once(getattr(pkgutil.resolve_name(owner), name)))
    for rank in ranks:
        rank.steps(5, loss=1.0, gradients={"sum_squares": 4.0})
    run.poll(0.0)

    values = shown(run)
    assert values["step"] == 5
    assert values["grad_norm"] == 2.0
    assert values["steps_total"] == 5
    assert values["records_dropped_total{0}"] == lost
    assert caplog.text.count("ArithmeticError: once") == 1


def test_what_cannot_be_shown_of_a_run_costs_its_gauges_alone_and_is_counted(
    start_rank: StartRank, open_run: OpenRun, monkeypatch
):
    rank = start_rank()
    run = open_run()
    rank.steps(3, gradients={"sum_squares": 4.0})
    run.poll(0.0)
    assert shown(run)["grad_norm"] == 2.0
    place = "mp_agent.node.accounting.latest.LatestStep.view"
    monkeypatch.setattr(place, fails_once(lambda latest, context: None, at=1))
    values = shown(run)
    assert values["steps_total"] == 3
    assert "grad_norm" not in values
    assert shown(run)["records_dropped_total{0}"] == 1
