"""Two jobs of one name at the same time on one node: the first is recorded, both are warned."""

import os
import subprocess
from pathlib import Path

import pytest

from mp_agent.node.run.launches import FEATURE
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import shown

DROPPED = "records_dropped_total{0}"
REPORTED = f"unsupported_info{{0,{FEATURE}}}"


@pytest.mark.slow
def test_the_first_job_is_recorded_whole_and_the_others_steps_are_counted_as_dropped(
    start_rank: StartRank, open_run: OpenRun, caplog: pytest.LogCaptureFixture
):
    first = start_rank(launch="a", created_unix_ns=1_000)
    run = open_run()
    run.poll(0.0)
    first.steps(20, loss=1.0)
    second = start_rank(launch="b", created_unix_ns=2_000)
    for now in range(10):
        first.steps(18, loss=1.0)
        second.steps(20, loss=9.0)
        run.poll(float(now))

    values = shown(run)
    assert values["steps_total"] == 200
    assert values["loss"] == 1.0
    assert values[DROPPED] == 200
    assert values[REPORTED] == 1
    assert caplog.text.count("Give each a name of its own") == 1
    assert "ERROR" in caplog.text


def test_what_was_counted_once_is_not_counted_again_by_the_next_agent(
    start_rank: StartRank, open_run: OpenRun
):
    first, second = start_rank(launch="a"), None
    run = open_run()
    run.poll(0.0)
    second = start_rank(launch="b", created_unix_ns=2_000)
    first.steps(5)
    second.steps(5)
    run.poll(0.0)
    run.commit()

    successor = open_run()
    successor.poll(1.0)
    second.steps(3)
    successor.poll(2.0)
    assert shown(successor)[DROPPED] == 8
    assert shown(successor)["steps_total"] == 5


@pytest.mark.parametrize("first_is_over", [False, True])
def test_the_others_steps_without_an_agent_are_recorded_or_counted_by_the_next(
    start_rank: StartRank, open_run: OpenRun, first_is_over: bool
):
    first = start_rank(launch="a", created_unix_ns=1_000)
    run = open_run()
    run.poll(0.0)
    second = start_rank(launch="b", created_unix_ns=2_000)
    first.steps(5)
    second.steps(4)
    run.poll(0.0)
    run.commit()
    second.steps(6, loss_nonfinite=1.0)
    if first_is_over:
        first.end(EndReason.COMPLETED)

    successor = open_run()
    successor.poll(1.0)
    successor.poll(2.0)
    values = shown(successor)
    assert values[DROPPED] == (4 if first_is_over else 10)
    assert values["loss_nonfinite_steps_total"] == (6 if first_is_over else 0)


def test_the_other_job_is_recorded_from_the_moment_the_first_one_is_over(
    start_rank: StartRank, open_run: OpenRun
):
    first = start_rank(launch="a", created_unix_ns=1_000)
    run = open_run()
    run.poll(0.0)
    second = start_rank(launch="b", created_unix_ns=2_000)
    first.steps(10)
    second.steps(4)
    run.poll(1.0)
    first.end(EndReason.COMPLETED)
    run.poll(2.0)
    second.steps(6, loss=3.0)
    run.poll(3.0)

    values = shown(run)
    assert values["steps_total"] == 20, "those made before count as well"
    assert values[DROPPED] == 4
    assert values["loss"] == 3.0
    assert values["run_active"] == 1
    assert REPORTED not in values


@pytest.mark.parametrize("agents", [1, 2])
def test_the_other_job_is_recorded_although_the_first_one_was_restarted_since(
    start_rank: StartRank, open_run: OpenRun, agents: int
):
    first = start_rank(launch="a", created_unix_ns=1_000)
    run = open_run()
    run.poll(0.0)
    second = start_rank(launch="b", created_unix_ns=2_000)
    second.steps(4)
    run.poll(1.0)
    again = start_rank(launch="a", attempt=1, created_unix_ns=3_000)
    run.poll(2.0)
    first.kill()
    if agents == 2:
        run.commit()
        run = open_run()
    run.poll(3.0)
    second.steps(5)
    again.steps(3)
    run.poll(4.0)
    assert shown(run)["steps_total"] == 3
    assert shown(run)[DROPPED] == 9
    again.end(EndReason.COMPLETED)
    run.poll(5.0)
    second.steps(6, loss=3.0)
    run.poll(6.0)

    values = shown(run)
    assert values["steps_total"] == 3 + 15
    assert values[DROPPED] == 9
    assert values["loss"] == 3.0


def test_an_older_job_that_ends_together_with_the_first_one_is_counted_once(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank(launch="a", created_unix_ns=1_000)
    run = open_run()
    run.poll(0.0)
    second = start_rank(launch="b", created_unix_ns=2_000)
    second.steps(4)
    run.poll(1.0)
    again = start_rank(launch="a", attempt=1, created_unix_ns=3_000)
    run.poll(2.0)
    again.end(EndReason.COMPLETED)
    second.steps(2)
    second.kill()
    run.poll(3.0)

    assert shown(run)[DROPPED] == 6


def test_another_job_that_ends_first_leaves_nothing_behind(
    start_rank: StartRank, open_run: OpenRun, run_dir: Path
):
    first = start_rank(launch="a", created_unix_ns=1_000)
    run = open_run()
    run.poll(0.0)
    second = start_rank(launch="b", created_unix_ns=2_000)
    second.steps(4)
    run.poll(1.0)
    second.kill()
    first.steps(2)
    run.poll(2.0)

    assert shown(run)["steps_total"] == 2
    assert shown(run)[DROPPED] == 4
    assert locations.find_rings(run_dir) == [first.path]


def test_ranks_that_an_elastic_launcher_starts_again_are_no_other_job(
    start_rank: StartRank, open_run: OpenRun
):
    first = start_rank(launch="a", created_unix_ns=1_000)
    first.steps(3)
    run = open_run()
    run.poll(0.0)
    start_rank(launch="a", attempt=1, created_unix_ns=2_000).steps(2)
    run.poll(1.0)
    first.kill()
    assert shown(run)["steps_total"] == 5
    start_rank(launch="c", created_unix_ns=3_000)
    run.poll(2.0)
    assert REPORTED in shown(run)


def test_ranks_that_a_script_starts_itself_after_it_has_trained_are_no_other_job(
    start_rank: StartRank, open_run: OpenRun
):
    script = start_rank(launch="a", pid=os.getpid(), created_unix_ns=1_000)
    script.steps(2)
    run = open_run()
    run.poll(0.0)
    with subprocess.Popen(["sleep", "60"]) as child:
        start_rank(launch="b", pid=child.pid, created_unix_ns=2_000).steps(3)
        run.poll(1.0)
        child.kill()

    assert script.running
    assert shown(run)["steps_total"] == 5


def test_a_launch_knows_whether_another_job_of_its_name_runs(start_rank: StartRank, run_dir: Path):
    first = start_rank(0, launch="a", world_size=2)
    mate = start_rank(1, launch="a", world_size=2)
    assert locations.other_jobs(run_dir, mate.identity) == []
    second = start_rank(0, launch="b")
    assert [name[0] for name in locations.other_jobs(run_dir, second.identity)] == ["a"]
    first.kill()
    mate.kill()
    assert locations.other_jobs(run_dir, second.identity) == []
