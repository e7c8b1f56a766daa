"""A rank whose losses are unlike those of all others."""

import random

import pytest

from mp_agent.node.accounting.ranks import RankLossTracker
from mp_agent.records.health import OddRank


def level_of(*ranks: list[float]) -> OddRank | None:
    tracker = RankLossTracker()
    for sequence, losses in enumerate(zip(*ranks, strict=True), 1):
        tracker.fold(dict(enumerate(losses)), sequence)
    return tracker.level


def around(loss: float, seed: int, steps: int = 32) -> list[float]:
    chance = random.Random(seed)
    return [loss * chance.uniform(0.8, 1.2) for _ in range(steps)]


@pytest.mark.parametrize(("loss", "found"), [(7.2, 2), (1.0, 2), (3.0, None)])
def test_of_several_ranks_one_is_found_whose_losses_are_high_or_low(loss, found):
    level = level_of(around(3.0, 1), around(3.0, 2), around(loss, 3))
    assert (level and level.rank) == found


def test_of_two_ranks_the_higher_one_is_found():
    level = level_of(around(1.0, 1), around(3.0, 2))
    assert level is not None
    assert level.rank == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_whose_losses_are_0_is_found_also_between_two(ranks):
    level = level_of([0.0] * 32, *(around(3.0, seed) for seed in range(ranks - 1)))
    assert level is not None
    assert (level.rank, level.loss, level.steps) == (0, 0.0, 32)
    assert level.usual == pytest.approx(3.0, rel=0.2)


def test_losses_that_are_0_now_and_then_or_on_several_ranks_or_negative_are_not():
    seldom = [0.0 if step % 2 else 3.0 for step in range(32)]
    assert level_of(seldom, around(3.0, 1)) is None
    assert level_of([0.0] * 32, [0.0] * 32, around(3.0, 1)) is None
    assert level_of([0.0] * 32, [0.0, *around(3.0, 1, 31)], around(3.0, 2)) is None
    assert level_of([-6.0] * 32, around(3.0, 1)) is None
