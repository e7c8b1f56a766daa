"""A rank whose losses are unlike those of all others."""

import random
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.ranks import RankLossTracker, _quantile
from mp_agent.node.accounting.tracker import AccountContext
from mp_agent.records.health import OddRank
from mp_agent.records.steps import FloatArray
from tests.agent.node.builders import merged_step
from tests.subtests import each


def level_of(*ranks: list[float]) -> OddRank | None:
    tracker = RankLossTracker()
    for sequence, losses in enumerate(zip(*ranks, strict=True), 1):
        tracker.fold(dict(enumerate(losses)), sequence)
    return tracker.level


def uneven(tokens: tuple[int, ...], steps: int = 1500, seed: int = 1) -> FloatArray:
    """Return losses [steps, R], means over so many tokens, few of which are badly predicted."""
    chance = np.random.default_rng(seed)
    breadths = np.minimum(0.3 + np.arange(steps) / 300, 2.0)
    means = [
        np.exp(breadths[:, None] * chance.standard_normal((steps, count))).mean(axis=1)
        for count in tokens
    ]
    return np.stack(means, axis=1) * np.exp(-(breadths**2) / 2)[:, None]


def found_in(losses_WR: FloatArray, *, restart_at: int = 0) -> set[tuple[str, int]]:
    """Return what was ever found, and of which rank. restart_at: step with a new node agent."""
    tracker, found = RankLossTracker(), set()
    adapter = TypeAdapter(RankLossTracker)
    for sequence, losses in enumerate(losses_WR, 1):
        if sequence == restart_at:
            tracker = adapter.validate_json(adapter.dump_json(tracker))
        tracker.fold(dict(enumerate(losses.tolist())), sequence)
        for kind, odd in (("outliers", tracker.outliers), ("level", tracker.level)):
            if odd is not None:
                found.add((kind, odd.rank))
    return found


@each("tokens", [(14, 98), (98, 14), (14, 98, 98, 98), (2, 14), (64, 448)])
@each("restart_at", [0, 700])
def test_a_rank_that_always_had_a_seventh_of_the_tokens_is_not_odd(tokens, restart_at):
    for seed in range(2):
        assert found_in(uneven(tokens, seed=seed), restart_at=restart_at) == set()


@pytest.mark.parametrize("tokens", [(14, 98), (14, 98, 98, 98)])
def test_what_goes_wrong_on_such_a_rank_is_found(tokens):
    losses_WR = uneven(tokens)
    losses_WR[700:, 0] += 6.0
    assert ("level", 0) in found_in(losses_WR)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("since", [0, 700])
def test_a_rank_of_as_many_tokens_whose_losses_are_higher_is_found(ranks, since):
    losses_WR = uneven((98,) * ranks)
    losses_WR[since::9, 1] *= 8.0
    assert found_in(losses_WR) == {("outliers", 1)}
    losses_WR = uneven((98,) * ranks)
    losses_WR[since:, 1] *= 5.0
    assert ("level", 1) in found_in(losses_WR)


def test_a_rank_whose_losses_become_noisy_is_found():
    losses_WR, chance = uneven((98, 98)), np.random.default_rng(3)
    losses_WR[700:, 1] *= np.exp(1.5 * chance.standard_normal(800))
    assert ("outliers", 1) in found_in(losses_WR)


def around(loss: float, seed: int, steps: int = 32) -> list[float]:
    chance = random.Random(seed)
    return [loss * chance.uniform(0.8, 1.2) for _ in range(steps)]


@pytest.mark.parametrize(("loss", "found"), [(7.2, 2), (1.0, 2), (3.0, None)])
def test_of_several_ranks_one_is_found_whose_losses_are_high_or_low(loss, found):
    level = level_of(around(3.0, 1), around(3.0, 2), around(loss, 3))
    assert (level and level.rank) == found


@pytest.mark.parametrize("independent", [False, True])
def test_ranks_that_train_models_of_their_own_are_not_compared(independent):
    context = AccountContext(resolve({}), 120.0, Progress())
    tracker = RankLossTracker()
    for sequence, losses in enumerate(zip(around(1.0, 1), around(4.0, 2), strict=True), 1):
        step = replace(
            merged_step(sequence),
            world_size=2,
            present_ranks=frozenset({0, 1}),
            losses=dict(enumerate(losses)),
            independent=independent,
        )
        tracker.observe(step, context)
    assert (tracker.level is None) is independent


def test_quantiles_are_those_of_numpy():
    ordered_WR = np.sort(np.random.default_rng(5).normal(size=(32, 50)), axis=0)
    for share in (0.25, 0.5, 0.75):
        expected = np.quantile(ordered_WR, share, axis=0)
        np.testing.assert_array_equal(_quantile(ordered_WR, share), expected)


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


def test_ranks_whose_losses_differ_by_any_factor_are_compared():
    ranks = [[1.0 + 0.1 * (step % 7) for step in range(200)]]
    ranks += [
        [1e-160 * (1.0 + 0.1 * ((step + rank) % 5)) for step in range(200)] for rank in (1, 2)
    ]
    odd = level_of(*ranks)
    assert odd is not None and odd.rank == 0
