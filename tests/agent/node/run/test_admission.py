"""Which rings belong to a run's present attempt, which begin the next, and which are over."""

import pytest

from mp_agent.node.run import run as run_module
from mp_agent.node.run.state import GRACE_SECONDS
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import shown


def test_the_next_attempt_takes_the_run_over_and_counters_go_on(
    start_rank: StartRank, open_run: OpenRun
):
    first = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in first:
        rank.steps(3)
        rank.count(probe_errors=1)
    run = open_run()
    run.poll(0.0)
    first[0].end(EndReason.FAILED)
    first[1].kill()
    run.poll(0.0)
    assert shown(run)["run_active"] == 0

    second = start_rank(0, attempt=1, created_unix_ns=9_000)
    second.steps(2)
    run.poll(0.0)
    values = shown(run)
    assert values["run_active"] == 1
    assert values["steps_total"] == 5
    assert values["step"] == 2
    assert values["probe_errors_total{0}"] == 2
    assert values["run_info{1,ddp,1,1,fp16,,,2.13.0}"] == 1
    assert "rank_up{1}" not in values
    assert not any(name.startswith("run_end_info") for name in values)
    assert not first[0].path.exists(), "what is over is removed"


def test_steps_of_the_old_attempt_that_were_not_read_yet_still_count(
    start_rank: StartRank, open_run: OpenRun
):
    old = start_rank(0)
    run = open_run()
    run.poll(0.0)
    old.steps(3)
    old.kill()
    start_rank(0, attempt=1, created_unix_ns=9_000).steps(2)
    run.poll(0.0)

    assert shown(run)["steps_total"] == 5


def test_each_of_many_starts_under_one_launcher_is_read(start_rank: StartRank, open_run: OpenRun):
    """As `torch.multiprocessing.spawn` in a loop: the paths of removed rings are used again."""
    run = open_run()
    for number, launch in enumerate(("a", "a-1", "a", "a-1")):
        rank = start_rank(launch=launch, created_unix_ns=1_000 + number)
        rank.steps(5)
        run.poll(0.0)
        assert shown(run)["steps_total"] == 5 * (number + 1)
        assert run.known_rings == (rank.path,)
        rank.end()
        rank.kill()


def test_ranks_that_begin_again_one_after_the_other_are_no_other_job(
    start_rank: StartRank, open_run: OpenRun, caplog: pytest.LogCaptureFixture
):
    """As after `shutdown()` and `init()` in each, where one saves a checkpoint in between."""
    before = [start_rank(rank, world_size=2, launch="a") for rank in range(2)]
    run = open_run()
    for rank in before:
        rank.steps(3)
    run.poll(0.0)
    before[0].end()
    after = [start_rank(0, world_size=2, launch="a-1", created_unix_ns=9_000)]
    assert not locations.other_jobs(run.run_dir, after[0].identity)
    after[0].steps(2)
    run.poll(1.0)
    assert shown(run)["steps_total"] == 3
    before[1].end()
    after.append(start_rank(1, world_size=2, launch="a-1", created_unix_ns=9_001))
    after[1].steps(2)
    run.poll(2.0)
    run.poll(3.0)

    values = shown(run)
    assert values["steps_total"] == 5
    assert values["records_dropped_total{0}"] == 0
    assert "another job" not in caplog.text


def test_a_rank_that_never_leaves_the_attempt_before_is_said_to_be_another_job(
    start_rank: StartRank, open_run: OpenRun, caplog: pytest.LogCaptureFixture
):
    for rank in range(2):
        start_rank(rank, world_size=2, launch="a")
    run = open_run()
    run.poll(0.0)
    again = start_rank(0, world_size=2, launch="a-1", created_unix_ns=9_000)
    again.steps(2)
    for now_seconds in (1.0, 2.0, 2.0 + GRACE_SECONDS, 3.0 + GRACE_SECONDS):
        assert "another job" not in caplog.text or now_seconds > GRACE_SECONDS
        run.poll(now_seconds)
    assert "another job" in caplog.text
    assert shown(run)["records_dropped_total{0}"] == 2


def test_ranks_that_come_back_under_other_numbers_are_the_next_attempt(
    start_rank: StartRank, open_run: OpenRun
):
    """As an elastic launcher starts them when a node has left; the agent looks only afterwards."""
    old = [
        start_rank(rank, launch="a", world_size=4, local_world_size=2, local_rank=rank - 2)
        for rank in (2, 3)
    ]
    run = open_run()
    run.poll(0.0)
    for rank in old:
        rank.steps(3)
    for rank in old:
        rank.kill()
    for number in (0, 1):
        start_rank(number, launch="b", world_size=2, created_unix_ns=9_000 + number).steps(2)
    run.poll(0.0)

    values = shown(run)
    assert {name for name in values if name.startswith("rank_up")} == {"rank_up{0}", "rank_up{1}"}
    assert values["coverage_ratio"] == 1.0
    assert values["step"] == 2


@pytest.mark.parametrize("by", ["the same agent", "its successor", "one without the old ring"])
def test_the_next_attempt_is_taken_up_although_the_clock_was_set_back(
    start_rank: StartRank, open_run: OpenRun, by: str
):
    old = start_rank(0, created_unix_ns=9_000)
    old.steps(3)
    run = open_run()
    run.poll(0.0)
    old.kill()
    if by != "the same agent":
        run.commit()
        run = open_run()
    if by == "one without the old ring":
        old.path.unlink()
    start_rank(0, attempt=1, created_unix_ns=1_000).steps(2)
    run.poll(0.0)

    assert shown(run)["steps_total"] == 5
    assert shown(run)["rank_up{0}"] == 1


def test_a_ring_that_was_read_completely_is_not_read_again_while_its_rank_hangs(
    start_rank: StartRank, open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
):
    hanging = start_rank(0, created_unix_ns=1_000)
    hanging.steps(3)
    run = open_run()
    run.poll(0.0)
    monkeypatch.setattr(run_module, "remove_ring", lambda path: None)
    again = start_rank(0, attempt=1, created_unix_ns=9_000)
    again.steps(2)
    run.poll(0.0)
    again.kill()
    run.poll(0.0)
    run.commit()
    assert hanging.running

    successor = open_run()
    successor.poll(0.0)
    successor.poll(0.0)
    assert shown(successor)["steps_total"] == 5
    assert shown(successor)["run_attempts_total"] == 2


def test_what_the_old_rings_said_is_in_the_ledger_before_they_are_removed(
    start_rank: StartRank, open_run: OpenRun
):
    old = start_rank(0)
    old.steps(3)
    old.kill()
    run = open_run()
    run.poll(0.0)
    start_rank(0, attempt=1, created_unix_ns=9_000)
    run.poll(0.0)
    assert not old.path.exists()

    successor = open_run()
    successor.poll(0.0)
    assert shown(successor)["steps_total"] == 3


def test_the_same_rank_under_another_launcher_is_the_next_attempt_after_the_old_end(
    start_rank: StartRank, open_run: OpenRun
):
    old = start_rank(0, launch="a")
    old.steps(3)
    run = open_run()
    run.poll(0.0)
    old.end()
    start_rank(0, launch="b", created_unix_ns=9_000).steps(2)
    run.poll(0.0)
    run.poll(0.0)

    assert shown(run)["steps_total"] == 5
    assert shown(run)["step"] == 2


def test_rings_of_a_launch_that_is_over_are_removed_unread(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank(0, attempt=1, created_unix_ns=9_000).steps()
    run = open_run()
    run.poll(0.0)
    stale = start_rank(0, launch="earlier", created_unix_ns=500)
    stale.steps(7)
    stale.kill()
    run.poll(0.0)

    assert shown(run)["steps_total"] == 1
    assert not stale.path.exists()


def test_two_nodes_on_one_machine_are_one_run(start_rank: StartRank, open_run: OpenRun):
    """`torchrun --nnodes=2` twice on one host: two launchers, one run directory."""
    node = {"world_size": 2, "local_world_size": 1, "local_rank": 0}
    start_rank(0, launch="a", node_rank=0, **node).steps()
    start_rank(1, launch="b", node_rank=1, created_unix_ns=5_000, **node).steps()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["coverage_ratio"] == 1.0
    assert values["run_info{0,ddp,2,2,fp16,,,2.13.0}"] == 1


def test_what_was_never_read_of_a_launch_that_is_over_counts_as_dropped(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank(0, launch="b", created_unix_ns=9_000).steps(2)
    run = open_run()
    run.poll(0.0)
    old = start_rank(0, launch="a", created_unix_ns=1_000)
    old.steps(7)
    old.kill()
    run.poll(0.0)

    assert shown(run)["records_dropped_total{0}"] == 7
    run.commit()
    successor = open_run()
    successor.poll(1.0)
    assert shown(successor)["records_dropped_total{0}"] == 7


def test_what_was_read_of_an_ended_launch_counts_for_nothing_when_it_is_found_again(
    start_rank: StartRank, open_run: OpenRun
):
    old = start_rank(0, launch="a", created_unix_ns=1_000)
    old.steps(7)
    run = open_run()
    run.poll(0.0)
    copy = old.path.read_bytes()
    old.kill()
    start_rank(0, launch="b", created_unix_ns=9_000).steps(2)
    run.poll(1.0)
    run.commit()
    # An agent that was killed after its commit has not come to deleting the ring.
    old.path.parent.mkdir(mode=0o700, exist_ok=True)
    old.path.write_bytes(copy)

    successor = open_run()
    successor.poll(2.0)
    assert shown(successor)["records_dropped_total{0}"] == 0
    assert not old.path.exists()
