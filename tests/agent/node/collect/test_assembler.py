from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mp_agent.node.collect.attempt import Assembler


def closed(assembler: Assembler[str], ranks: set[int], now_seconds: float = 0.0, **limits: Any):
    return [
        (sequence, dict(items))
        for sequence, items in assembler.close_ready(ranks, now_seconds, **limits)
    ]


def test_a_step_closes_when_all_ranks_have_delivered_it():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(0, 1, "a", 0.0)
    assert closed(assembler, {0, 1}) == []

    assembler.add(1, 1, "b", 0.0)
    assert closed(assembler, {0, 1}) == [(1, {0: "a", 1: "b"})]
    assert assembler.closed_sequence == 1


def test_a_rank_that_has_gone_past_a_step_is_not_waited_for():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(0, 1, "a", 0.0)
    assembler.add(1, 2, "b", 0.0)

    assert closed(assembler, {0, 1}) == [(1, {0: "a"})]


def test_the_oldest_step_closes_first_whichever_rank_was_read_first():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(1, 2, "b", 0.0)
    assembler.add(0, 1, "a", 0.0)
    assembler.add(0, 2, "a", 0.0)

    assert [sequence for sequence, _ in closed(assembler, {0, 1})] == [1, 2]
    assert assembler.late == 0


def test_a_rank_that_is_gone_is_not_waited_for():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(0, 1, "a", 0.0)

    assert closed(assembler, {0}) == [(1, {0: "a"})]


def test_the_deadline_closes_a_step_without_the_rank_that_hangs():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(0, 1, "a", 100.0)

    assert closed(assembler, {0, 1}, 109.9) == []
    assert closed(assembler, {0, 1}, 110.0) == [(1, {0: "a"})]


def test_after_a_missed_deadline_a_rank_is_awaited_again_only_once_it_delivers():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(0, 1, "a", 0.0)
    closed(assembler, {0, 1}, 10.0)

    assembler.add(0, 2, "a", 11.0)
    assert closed(assembler, {0, 1}, 11.0) == [(2, {0: "a"})]

    assembler.add(1, 3, "b", 12.0)
    assembler.add(0, 3, "a", 12.0)
    assembler.add(0, 4, "a", 12.0)
    assert [sequence for sequence, _ in closed(assembler, {0, 1}, 12.0)] == [3]


def test_rows_of_closed_steps_are_counted_and_left_out():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(0, 1, "a", 0.0)
    closed(assembler, {0}, 0.0)
    assembler.add(1, 1, "late", 0.0)

    assert assembler.late == 1
    assert closed(assembler, {0, 1}, 99.0) == []


def test_nothing_closes_beyond_the_limit():
    assembler: Assembler[str] = Assembler(10.0)
    for sequence in (1, 2):
        assembler.add(0, sequence, "a", 0.0)

    assert [s for s, _ in closed(assembler, {0}, 99.0, up_to=1)] == [1]


def test_a_run_far_ahead_of_one_rank_keeps_memory_bounded():
    assembler: Assembler[str] = Assembler(10.0, pending_at_most=4)
    for sequence in range(1, 8):
        assembler.add(0, sequence, "a", 0.0)

    assert [s for s, _ in closed(assembler, {0, 1})][:3] == [1, 2, 3]


def test_close_all_gives_what_is_left_in_order():
    assembler: Assembler[str] = Assembler(10.0)
    for sequence in (3, 1, 2):
        assembler.add(0, sequence, "a", 0.0)

    assert [sequence for sequence, _ in assembler.close_all()] == [1, 2, 3]


@given(
    lag=st.lists(st.integers(0, 5), min_size=40, max_size=40),
    order=st.randoms(use_true_random=False),
)
def test_every_row_that_is_not_late_is_closed_exactly_once_and_in_order(lag, order):
    """Two ranks deliver 20 steps each, interleaved at random; none is ever lost."""
    assembler: Assembler[tuple[int, int]] = Assembler(3.0)
    queues = {rank: [(rank, sequence) for sequence in range(1, 21)] for rank in range(2)}
    seen: list[tuple[int, dict[int, tuple[int, int]]]] = []
    now_seconds = 0.0
    for pause in lag:
        rank = order.choice([rank for rank, queue in queues.items() if queue])
        item = queues[rank].pop(0)
        assembler.add(*item, item, now_seconds)
        now_seconds += pause
        seen += [(s, dict(i)) for s, i in assembler.close_ready(set(queues), now_seconds)]
    seen += [(s, dict(i)) for s, i in assembler.close_all()]

    sequences = [sequence for sequence, _ in seen]
    assert sequences == sorted(set(sequences))
    rows = [row for _, items in seen for row in items.values()]
    assert len(rows) == len(set(rows)) == 40 - assembler.late
    assert all(item == (rank, s) for s, items in seen for rank, item in items.items())


def test_nothing_more_comes_below_what_every_awaited_rank_has_passed():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.advance(0, 7)
    assembler.advance(1, 4)

    assert assembler.floor({0, 1}) == 4
    assert assembler.floor({0}) == 7
    assert assembler.floor(set()) == 7, "of the others all there is was read"


def test_what_is_pending_may_still_come():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(0, 3, "a", 0.0)
    assembler.advance(0, 9)

    assert assembler.floor({0}) == 2
    assert closed(assembler, {0}) == [(3, {0: "a"})]
    assert assembler.floor({0}) == 9


def test_a_rank_that_is_not_waited_for_does_not_hold_the_floor():
    assembler: Assembler[str] = Assembler(10.0)
    assembler.add(0, 3, "a", 0.0)

    assert closed(assembler, {0, 1}, 10.0) == [(3, {0: "a"})]
    assert assembler.floor({0, 1}) == 3
