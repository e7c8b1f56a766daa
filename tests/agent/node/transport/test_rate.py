from mp_agent.node.transport.client import LONGEST_AT_END_SECONDS, LONGEST_SECONDS, Backoff
from mp_agent.node.transport.handlers import RateLimit


def test_a_node_may_catch_up_and_is_then_held_to_its_rate():
    limit = RateLimit(per_second=2.0, at_once=10.0)
    assert [limit.admits(("llama", 1), 0.0) for _ in range(11)] == [True] * 10 + [False]
    assert [limit.admits(("llama", 1), 1.0) for _ in range(3)] == [True, True, False]


def test_one_node_does_not_use_up_what_another_may_send():
    limit = RateLimit(per_second=1.0, at_once=1.0)
    assert limit.admits(("llama", 1), 0.0)
    assert not limit.admits(("llama", 1), 0.0)
    assert limit.admits(("llama", 2), 0.0)
    assert limit.admits(("gpt", 1), 0.0)


def test_a_run_that_is_over_leaves_nothing():
    limit = RateLimit(per_second=1.0, at_once=1.0)
    limit.admits(("llama", 1), 0.0)
    limit.admits(("gpt", 1), 0.0)
    limit.forget("llama")
    assert limit._buckets.keys() == {("gpt", 1)}


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_success():
    backoff = Backoff(chance=lambda: 0.0)
    pauses = [backoff.next_pause_seconds() for _ in range(3000)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == LONGEST_SECONDS
    assert backoff.next_pause_seconds(at_end=True) == LONGEST_AT_END_SECONDS
    backoff.reset()
    assert backoff.next_pause_seconds() == 0.5


def test_chance_takes_up_to_half_of_a_pause():
    assert Backoff(chance=lambda: 1.0).next_pause_seconds() == 0.25


def test_a_shorter_limit_holds_at_the_end_too():
    backoff = Backoff(chance=lambda: 0.0, longest_seconds=1.0)
    assert [backoff.next_pause_seconds(at_end=end) for end in (False, False, False, True)] == [
        *(0.5, 1.0, 1.0, 1.0)
    ]
