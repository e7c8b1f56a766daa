from types import SimpleNamespace

from mp_agent.node.run.unwatched_ranks import PATIENCE_SECONDS, UnwatchedRanks


def _attempt(expected: set[int], seen: set[int], steps: int = 5) -> SimpleNamespace:
    return SimpleNamespace(
        expected_ranks=expected, sources=dict.fromkeys(seen), newest_sequence=steps
    )


def test_a_rank_without_a_ring_is_named_once_when_others_have_made_steps_for_a_while(caplog):
    unwatched = UnwatchedRanks()
    half = _attempt({0, 1, 2, 3}, {0, 2})
    for now_seconds in (0.0, PATIENCE_SECONDS - 1, PATIENCE_SECONDS, PATIENCE_SECONDS + 100):
        unwatched.look("llama", half, now_seconds)
    assert [record.getMessage().split(". ")[0] for record in caplog.records] == [
        "run llama: not watched on this node: rank 1, 3"
    ]


def test_ranks_that_appear_in_time_or_have_not_stepped_are_not_named(caplog):
    unwatched = UnwatchedRanks()
    unwatched.look("llama", _attempt({0, 1}, {0}), 0.0)
    unwatched.look("llama", _attempt({0, 1}, {0, 1}), PATIENCE_SECONDS - 1)
    unwatched.look("llama", _attempt({0, 1}, {0}, steps=0), PATIENCE_SECONDS + 1)
    unwatched.look("llama", _attempt({0, 1}, {0}), 3 * PATIENCE_SECONDS)
    assert not caplog.records
