from types import SimpleNamespace
from typing import Any

from mp_agent.node.run.state import GRACE_SECONDS, UnwatchedRanks
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import shown


def test_a_dead_rank_keeps_its_series_for_the_linger_then_only_its_being_gone(
    start_rank: StartRank, open_run: OpenRun
):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.steps()
    run = open_run()
    ranks[1].kill()
    run.poll(0.0)
    assert shown(run, 59.0)["rank_step{1}"] == 1

    run.poll(60.0)
    values = shown(run, 60.0)
    assert "rank_step{1}" not in values
    assert values["rank_up{1}"] == 0
    assert values["rank_step{0}"] == 1
    assert values["run_active"] == 1


def test_a_rank_of_the_next_attempt_is_shown_however_long_its_predecessor_is_gone(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank().kill()
    run = open_run()
    run.poll(0.0)
    second = start_rank(attempt=1, created_unix_ns=9_000)
    second.steps(2)
    run.poll(100.0)
    second.kill()
    run.poll(101.0)

    assert shown(run, 101.0)["rank_step{0}"] == 2


def _attempt(expected: set[int], seen: set[int], steps: int = 5) -> Any:
    return SimpleNamespace(
        expected_ranks=expected, sources=dict.fromkeys(seen), newest_sequence=steps
    )


def test_a_rank_without_a_ring_is_named_once_when_others_have_made_steps_for_a_while(caplog):
    unwatched = UnwatchedRanks()
    half = _attempt({0, 1, 2, 3}, {0, 2})
    for now_seconds in (0.0, GRACE_SECONDS - 1, GRACE_SECONDS, GRACE_SECONDS + 100):
        unwatched.check("llama", half, now_seconds)
    assert [record.getMessage().split(". ")[0] for record in caplog.records] == [
        "run llama: not watched on this node: rank 1, 3"
    ]


def test_ranks_that_appear_in_time_or_have_not_stepped_are_not_named(caplog):
    unwatched = UnwatchedRanks()
    unwatched.check("llama", _attempt({0, 1}, {0}), 0.0)
    unwatched.check("llama", _attempt({0, 1}, {0, 1}), GRACE_SECONDS - 1)
    unwatched.check("llama", _attempt({0, 1}, {0}, steps=0), GRACE_SECONDS + 1)
    unwatched.check("llama", _attempt({0, 1}, {0}), 3 * GRACE_SECONDS)
    assert not caplog.records
