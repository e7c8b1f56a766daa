"""Two threads alternate, meet at equal events, and leave nothing behind."""

import threading

import pytest
import torch

from mp_agent.plan.execution.lockstep import CANDIDATE, REFERENCE, Lockstep, SideEvent


def bodies(lockstep, *sequences, ordered=True):
    def body(index):
        def run():
            for key in sequences[index]:
                within = ()
                if isinstance(key, tuple):
                    key, within = key
                lockstep.post(index, SideEvent(key, (index, key), within), ordered=ordered)

        return run

    return body(REFERENCE), body(CANDIDATE)


def compared(*sequences, ordered=True):
    met = []
    lockstep = Lockstep(lambda key, reference, candidate: met.append((key, reference, candidate)))
    assert lockstep.run(*bodies(lockstep, *sequences, ordered=ordered)) is None
    assert all(reference == (0, key) and candidate == (1, key) for key, reference, candidate in met)
    assert threading.active_count() == 1 or not any(
        thread.name.startswith("compare-") for thread in threading.enumerate()
    )
    return [key for key, _, _ in met], lockstep


def test_equal_events_are_compared_in_order():
    assert compared("abc", "abc")[0] == ["a", "b", "c"]
    assert compared("", "")[0] == []


def test_both_sides_go_on_from_the_end_of_the_call_that_both_are_in():
    inside = ("end",)
    reference = ["begin", ("x", inside), ("y", inside), ("end", inside), "after"]
    candidate = ["begin", ("z", inside), ("end", inside), "after"]
    keys, lockstep = compared(reference, candidate)
    assert keys == ["begin", "end", "after"]
    assert lockstep.diverged == ["x against z"] and lockstep.unmatched == 3


def test_a_side_that_ends_early_does_not_stop_the_other():
    assert compared("abc", "a")[0] == ["a"]
    assert compared("a", "abc")[0] == ["a"]


def test_gradients_may_come_in_any_order():
    keys, _ = compared("abcd", "badc", ordered=False)
    assert sorted(keys) == ["a", "b", "c", "d"]


def test_what_a_candidate_raises_is_returned_and_what_the_reference_raises_is_raised():
    def fail():
        raise ValueError("planted")

    lockstep = Lockstep(lambda *arguments: None)
    error = lockstep.run(bodies(lockstep, "abc", "abc")[0], fail)
    assert isinstance(error, ValueError)
    lockstep = Lockstep(lambda *arguments: None)
    with pytest.raises(ValueError, match="planted"):
        lockstep.run(fail, bodies(lockstep, "abc", "abc")[1])
    assert not any(thread.name.startswith("compare-") for thread in threading.enumerate())


def test_each_side_draws_the_random_numbers_that_it_would_alone():
    torch.manual_seed(3)
    alone = [float(torch.rand(())) for _ in range(3)]
    torch.manual_seed(3)
    drawn: dict[int, list[float]] = {REFERENCE: [], CANDIDATE: []}
    lockstep = Lockstep(lambda *arguments: None)

    def body(index):
        def run():
            for step in range(3):
                drawn[index].append(float(torch.rand(())))
                lockstep.post(index, SideEvent(step, None))

        return run

    lockstep.run(body(REFERENCE), body(CANDIDATE))
    assert drawn == {REFERENCE: alone, CANDIDATE: alone}
    assert float(torch.rand(())) == alone[0]
