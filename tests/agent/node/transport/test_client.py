from mp_agent.node.transport.client import LONGEST_AT_END_SECONDS, LONGEST_SECONDS, Backoff


def test_pauses_double_up_to_a_limit_and_start_over_after_a_success():
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
