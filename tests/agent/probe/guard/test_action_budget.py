"""How often a policy may act."""

import pytest
import torch

from mp_agent.probe.guard.verdict import ActionBudget

CPU = torch.device("cpu")


def _granted(budget: ActionBudget, steps: int, *, wanted: bool = True) -> int:
    return sum(bool(budget.grant(torch.tensor(wanted))) for _ in range(steps))


def test_acts_as_often_at_once_as_it_may_and_then_at_the_rate_of_the_window():
    budget = ActionBudget(3, 10, CPU)
    assert _granted(budget, 3) == 3
    assert 29 <= _granted(budget, 100) <= 31


@pytest.mark.parametrize("window_steps", [1, 7, 20, 60])
def test_no_window_of_steps_has_more_actions_than_it_may(window_steps):
    budget = ActionBudget(5, window_steps, CPU)
    wanted = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.7
    acted = [bool(budget.grant(each)) for each in wanted]
    windows = [acted[first : first + window_steps] for first in range(len(acted))]
    assert max(map(sum, windows)) == min(5, window_steps)
    if window_steps <= 5:
        assert acted == wanted.tolist()


def test_what_is_left_is_what_would_be_granted_from_the_next_step_on():
    budget = ActionBudget(3, 10, CPU)
    wanted = torch.rand(200, generator=torch.Generator().manual_seed(1)) < 0.5
    for each in wanted:
        left = int(budget.left())
        assert bool(budget.grant(each)) == (bool(each) and left > 0)
    assert 0 <= int(budget.left()) <= 3


def test_what_is_not_used_comes_back_and_is_not_saved_beyond_the_limit():
    budget = ActionBudget(2, 10, CPU)
    assert _granted(budget, 2) == 2
    assert _granted(budget, 100, wanted=False) == 0
    assert [bool(budget.grant(torch.tensor(True))) for _ in range(3)] == [True, True, False]
