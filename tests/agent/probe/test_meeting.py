"""Ranks at one store: what one of them decides holds for all, also for late or absent ones."""

import random
import time
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

import pytest
import torch.distributed as dist

from mp_agent.probe import meeting as meeting_module
from mp_agent.probe.meeting import Meeting, NotMet

RANKS = (4, 5, 7)
WAIT_SECONDS = 0.5

T = TypeVar("T")


def _meetings(wait_seconds: float = WAIT_SECONDS) -> list[Meeting]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [
        Meeting("the guard/0", store, RANKS, position, wait_seconds)
        for position in range(len(RANKS))
    ]


def _together(*calls: Callable[[], T]) -> list[T | NotMet]:
    """Call all at once, each in a thread; return what they return or raise."""
    found: list[T | NotMet | None] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except NotMet as error:
            found[place] = error

    threads = [Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each for each in found if each is not None]


def _join(meeting: Meeting, after_seconds: float = 0.0, **settings: object) -> bool:
    time.sleep(after_seconds)
    meeting.join(settings)
    return True


def test_ranks_that_are_alike_meet():
    meetings = _meetings(wait_seconds=30.0)
    assert _together(*(lambda m=m: _join(m, factor=3.0) for m in meetings)) == [True] * 3


def test_a_setting_that_differs_is_named_with_its_ranks_and_said_by_the_first():
    first, second, third = _meetings(wait_seconds=30.0)
    found = _together(
        lambda: _join(first, factor=3.0, dry_run=False),
        lambda: _join(second, factor=3.0, dry_run=False),
        lambda: _join(third, 0.2, factor=4.0, dry_run=False),
    )
    assert [type(each) for each in found] == [NotMet] * 3
    (problem,) = {str(each) for each in found}
    assert problem.startswith("factor is 3 on rank ") and problem.endswith(" and 4 on rank 7")
    assert [each.speaks for each in found if isinstance(each, NotMet)] == [True, False, False]


def test_ranks_that_do_not_come_are_named_and_said_by_the_first_that_is_there():
    _, second, third = _meetings()
    found = _together(lambda: _join(second), lambda: _join(third))
    assert {str(each) for each in found} == {"rank 4 takes no part within 0.5 s"}
    assert [each.speaks for each in found if isinstance(each, NotMet)] == [True, False]


def test_a_rank_that_comes_after_the_others_have_given_up_gives_up_as_well():
    first, second, third = _meetings()
    _together(lambda: _join(first), lambda: _join(second))
    with pytest.raises(NotMet, match="rank 7 takes no part"):
        third.join({})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_at_the_last_moment_all_decide_alike(seed):
    """The last rank comes about when the others stop waiting: all go on, or none does."""
    first, second, third = _meetings(wait_seconds=0.1)
    chance = random.Random(seed)
    found = _together(
        lambda: _join(first),
        lambda: _join(second),
        lambda: _join(third, 0.1 + chance.uniform(-0.01, 0.01)),
    )
    assert len({type(each) for each in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_no_rank_acts_unless_all_agree(late):
    first, second, third = _meetings()
    agreed = (lambda: first.all_agree(True), lambda: second.all_agree(True))
    if late:
        assert _together(*agreed) == [False] * 2
        assert not third.all_agree(True)
    else:
        assert _together(*agreed, lambda: third.all_agree(False)) == [False] * 3
    others = _meetings(wait_seconds=30.0)
    for _ in range(3):
        assert _together(*(lambda m=m: m.all_agree(True) for m in others)) == [True] * 3


@pytest.fixture(autouse=True)
def no_meetings_before(monkeypatch):
    monkeypatch.setattr(meeting_module, "_incomplete", set())


@pytest.fixture
def job(monkeypatch):
    """A job of two ranks in this process; returns what makes their meetings in an attempt."""
    stores = [dist.HashStore()]  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: stores[-1])
    monkeypatch.setattr(meeting_module, "_timeout_seconds", lambda group, store: 2.0)

    def meetings(name: str, attempt: int = 0, *, new_store: bool = False) -> list[Meeting]:
        if new_store:
            stores.append(dist.HashStore())  # type: ignore[attr-defined]
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        members = []
        for rank in range(2):
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            member = Meeting.of(name, None)
            assert member is not None
            members.append(member)
        return members

    return meetings


def test_ranks_that_did_not_come_are_waited_for_once(job):
    (missed,) = _together(lambda: _join(job("the guard")[0]))
    assert isinstance(missed, NotMet)
    first, second = job("the reduction")
    (missed,) = _together(lambda: _join(first))
    assert isinstance(missed, NotMet) and "no part within 0.05 s" in str(missed)
    first, second = job("another reduction")
    assert first.wait_seconds == WAIT_SECONDS, "the limit of collectives stays"
    assert _together(lambda: _join(first), lambda: _join(second)) == [True] * 2


@pytest.mark.parametrize("ends_early", [False, True])
def test_ranks_that_are_restarted_at_the_same_store_meet_again(job, ends_early):
    first, second = job("the guard", attempt=0)
    assert _together(lambda: _join(first), lambda: _join(second)) == [True] * 2
    assert _together(lambda: first.all_agree(True), lambda: second.all_agree(True)) == [True] * 2
    first, second = job("the guard", attempt=1)
    if ends_early:
        (missed,) = _together(lambda: _join(first))
        assert isinstance(missed, NotMet) and "rank 1 takes no part" in str(missed)
    else:
        assert _together(lambda: _join(first), lambda: _join(second)) == [True] * 2
        assert not first.all_agree(True)


def test_a_process_that_replaces_another_meets_those_that_have_met_before(job):
    """At the store of the groups that are made again no rank has met, whatever was before."""
    first, _ = job("the guard")
    assert isinstance(_together(lambda: _join(first))[0], NotMet)
    for new_store in (True, False):
        members = job("the guard", new_store=new_store)
        assert _together(*(lambda m=m: _join(m) for m in members)) == [True] * 2
