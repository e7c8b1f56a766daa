from dataclasses import replace
from math import exp, isfinite
from random import Random
from sys import float_info

import numpy as np
import pytest
from pydantic import TypeAdapter

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.loss import (
    BLOCK_STEPS,
    RECENT_STEPS,
    TREND_BLOCKS,
    WARM_UP_STEPS,
    WINDOW_STEPS,
    LossTracker,
)
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from mp_agent.records.health import LossHistory
from mp_agent.records.merged import MergedStep
from tests.agent.node.builders import merged_step
from tests.subtests import each

THRESHOLDS = resolve({})


def fold(watch: LossTracker, *losses: float) -> list[bool]:
    """Take losses in; return on which steps the watch said that it is a spike."""
    spikes = []
    for loss in losses:
        watch.fold(merged_step(1, loss=loss), THRESHOLDS)
        spikes.append(watch.spiking)
    return spikes


def noisy(count: int, mean: float = 2.0, scatter: float = 0.05, seed: int = 0) -> list[float]:
    random = Random(seed)
    return [random.gauss(mean, scatter) for _ in range(count)]


def test_level_and_bound_are_those_of_numpy_over_the_last_losses():
    losses = noisy(1000)
    watch = LossTracker()
    fold(watch, *losses)
    level = watch.level(THRESHOLDS)

    recent = np.array(losses[-WINDOW_STEPS:])
    center = np.median(recent)
    spread = np.median(np.abs(recent - center))
    assert level is not None
    assert level.median == pytest.approx(center)
    assert level.deviation == pytest.approx(spread)
    assert level.spike_bound == pytest.approx(center + 6 * spread)


def test_a_spike_is_judged_by_the_losses_before_it():
    watch = LossTracker()
    fold(watch, *noisy(200))

    assert fold(watch, 5.0, 5.0, 5.0) == [False, True, True]


def test_a_single_odd_batch_is_no_spike_and_two_of_three_are():
    watch = LossTracker()
    fold(watch, *noisy(200))

    assert fold(watch, 9.0, 2.0, 2.0, 9.0, 2.0, 2.0) == [False] * 6
    assert fold(watch, 9.0, 9.0) == [True, True]


def test_single_odd_losses_are_spikes_from_the_third_of_64_on():
    watch = LossTracker()
    fold(watch, *noisy(200))
    once_in_ten = [9.0 if step % 10 == 5 else 2.0 for step in range(60)]

    spikes = fold(watch, *once_in_ten)
    assert [step for step, spiking in enumerate(spikes) if spiking] == [25, 35, 45, 55]


def test_single_odd_losses_that_there_were_before_are_no_spikes():
    random, watch = Random(5), LossTracker()
    fold(watch, *(9.0 if random.random() < 0.1 else 2.0 for _ in range(200)))

    assert not any(fold(watch, *(9.0 if step % 20 == 5 else 2.0 for step in range(100))))


def test_healthy_noise_with_heavy_tails_makes_few_spikes():
    random = Random(3)
    losses = [2.0 + 0.05 * random.gauss(0, 1) / max(random.random(), 0.05) for _ in range(5000)]
    watch = LossTracker()

    assert sum(fold(watch, *losses)) < 50


def test_nothing_is_judged_before_the_warm_up():
    watch = LossTracker()

    assert not any(fold(watch, *([2.0, 1000.0] * (WARM_UP_STEPS // 2))))
    assert LossTracker().level(THRESHOLDS) is None
    assert watch.level(THRESHOLDS) is not None


def test_a_steep_fall_is_no_spike():
    assert not any(fold(LossTracker(), *(10.0 * 0.99**step for step in range(800))))


def falling(count: int, scale_steps: float, scatter: float = 0.03, seed: int = 0) -> list[float]:
    """Return losses that fall from 5.5 to 1.6, with a scatter in shares of their level."""
    random = Random(seed)
    levels = (1.6 + 3.9 * exp(-step / scale_steps) for step in range(count))
    return [level * random.gauss(1.0, scatter) for level in levels]


@pytest.mark.parametrize(
    ("scale_steps", "before", "after"),
    [(30.0, 73, 3.8), (30.0, 150, 3.0), (100.0, 200, 4.0), (15.0, 250, 2.5)],
)
def test_a_jump_of_a_loss_that_fell_until_lately_is_a_spike(scale_steps, before, after):
    watch = LossTracker()
    assert not any(fold(watch, *falling(before, scale_steps)))
    assert fold(watch, after, 1.02 * after) == [False, True]


@each("fall", [1.0, 1.2])
@each("seed", range(8))
def test_a_jump_by_as_much_as_the_loss_fell_is_a_spike(fall, seed):
    """A fall of about as much as the bound's distance, most of it within few blocks."""
    random, watch = Random(seed), LossTracker()
    levels = [2.3 + fall * exp(-step / 40) for step in range(150)]
    assert not any(fold(watch, *(level * random.gauss(1.0, 0.03) for level in levels)))
    assert any(fold(watch, *(3.6 * random.gauss(1.0, 0.01) for _ in range(4))))


def test_outliers_that_go_on_are_no_spikes_although_the_loss_falls():
    random, watch = Random(0), LossTracker()
    levels = (2.3 + 1.5 * exp(-step / 100) for step in range(400))
    losses = [level * random.gauss(1.0, 0.01) for level in levels]
    outliers = [2.0 * loss if step % 53 < 3 else loss for step, loss in enumerate(losses)]

    assert not any(fold(watch, *outliers))


@each("scale_steps", [15.0, 60.0, 200.0, 1000.0])
@each("scatter", [0.005, 0.03, 0.1])
def test_the_scatter_of_a_falling_loss_is_no_spike(scale_steps, scatter):
    for seed in range(20):
        assert not any(fold(LossTracker(), *falling(400, scale_steps, scatter, seed)))


def test_a_tenth_of_the_fall_is_no_spike():
    watch = LossTracker()
    fold(watch, *falling(200, 30.0, 0.001))

    assert fold(watch, 1.8, 1.8, 1.8) == [False] * 3


def test_tasks_in_turn_are_no_spikes_although_the_loss_falls():
    watch, losses = LossTracker(), falling(600, 150.0)
    turns = [loss + 1.0 * (step // 40 % 2) for step, loss in enumerate(losses)]

    assert not any(fold(watch, *turns))


def test_the_bound_of_a_falling_loss_is_not_below_its_usual_level():
    watch = LossTracker()
    for step, loss in enumerate(falling(300, 100.0, 0.003)):
        fold(watch, loss)
        level = watch.level(THRESHOLDS)
        assert (level is None) == (step + 1 < WARM_UP_STEPS)
        assert level is None or level.spike_bound >= level.median


def test_of_a_constant_loss_the_floor_is_the_deviation():
    watch = LossTracker()
    fold(watch, *([2.0] * 300))
    level = watch.level(THRESHOLDS)

    assert level is not None
    assert (level.median, level.deviation) == (2.0, 0.0)
    assert level.spike_bound == pytest.approx(2.0 * 1.06)
    assert fold(watch, 2.1, 2.1, 2.2, 2.2) == [False, False, False, True]


def test_a_loss_of_zero_throughout_has_no_scale():
    watch = LossTracker()
    fold(watch, *([0.0] * 300))

    assert watch.level(THRESHOLDS) is None
    assert not any(fold(watch, 1e-12, 1e-12, 1e-12))


def test_a_negative_loss_has_a_bound_above_it():
    watch = LossTracker()
    fold(watch, *([-2.0] * 300))
    level = watch.level(THRESHOLDS)

    assert level is not None
    assert level.spike_bound == pytest.approx(-2.0 + 6 * 0.02)


@pytest.mark.parametrize("size", [float_info.max, 1e308, 1e-320])
def test_everything_stays_finite_at_the_ends_of_float64(size):
    watch = LossTracker()
    fold(watch, *([size, -size] * 700))
    level, trend = watch.level(THRESHOLDS), watch.trend(THRESHOLDS)

    assert level is not None
    assert isfinite(level.median) and isfinite(level.deviation) and isfinite(level.spike_bound)
    assert trend is None or isfinite(trend)


@pytest.mark.parametrize(
    "step",
    [
        merged_step(1),
        merged_step(1, loss=99.0, skipped=1.0),
        merged_step(1, loss=99.0, loss_nonfinite=1.0),
    ],
    ids=["no loss", "skipped", "not finite on a rank"],
)
def test_what_does_not_count_enters_nothing_and_is_no_spike(step):
    watch = LossTracker()
    fold(watch, *noisy(200))
    before = TypeAdapter(LossTracker).dump_json(watch)
    watch.fold(step, THRESHOLDS)

    assert not watch.spiking
    assert TypeAdapter(LossTracker).dump_json(watch) == before


def trend(losses: list[float]) -> float | None:
    watch = LossTracker()
    fold(watch, *losses)
    return watch.trend(THRESHOLDS)


LONG = BLOCK_STEPS * TREND_BLOCKS


def test_the_trend_is_that_of_block_medians_by_numpy():
    losses = noisy(2 * LONG + 5, scatter=0.2, seed=4)
    blocks = np.median(np.reshape(losses[: 2 * LONG], (2, TREND_BLOCKS, BLOCK_STEPS)), axis=2)
    before, recent = np.median(blocks, axis=1)
    spread = max(np.median(np.abs(blocks[0] - before)), 0.01 * abs(before))

    assert trend(losses) == pytest.approx((recent - before) / spread)


def test_a_loss_that_rises_shows_and_one_that_falls_does_not():
    rising = trend([2.0 + step / LONG for step in range(2 * LONG)])
    falling = trend([2.0 - step / LONG for step in range(2 * LONG)])
    assert rising is not None and falling is not None
    assert rising > 3 > 0 > falling


@pytest.mark.parametrize("seed", range(5))
def test_noise_about_one_level_has_no_trend(seed):
    found = trend(noisy(2 * LONG, scatter=0.3, seed=seed))

    assert found is not None
    assert abs(found) < 2


def test_a_spike_of_a_hundred_steps_is_no_trend():
    losses = noisy(2 * LONG)
    losses[-150:-50] = [9.0] * 100
    found = trend(losses)

    assert found is not None
    assert abs(found) < 2


def test_without_two_whole_windows_there_is_no_trend():
    assert trend(noisy(2 * LONG - 1)) is None
    assert trend(noisy(2 * LONG)) is not None


@pytest.mark.parametrize(("level", "expected"), [(0.0, 0.0), (2.0, 0.0)])
def test_a_constant_loss_has_no_trend(level, expected):
    assert trend([level] * 2 * LONG) == expected


def test_a_rise_from_nothing_has_no_scale():
    assert trend([0.0] * LONG + [1.0] * LONG) is None


def test_memory_is_bounded_and_survives_the_ledger():
    watch = LossTracker()
    fold(watch, *noisy(5000))
    adapter = TypeAdapter(LossTracker)
    copy = adapter.validate_json(adapter.dump_json(watch))

    assert len(watch.window) == WINDOW_STEPS
    assert len(watch.medians) == 2 * TREND_BLOCKS
    assert len(watch.block) < BLOCK_STEPS
    assert copy == watch
    assert fold(copy, *noisy(100, seed=9)) == fold(watch, *noisy(100, seed=9))
    assert copy.trend(THRESHOLDS) == watch.trend(THRESHOLDS)
    assert copy.level(THRESHOLDS) == watch.level(THRESHOLDS)
    assert copy.recent == watch.recent == sorted(watch.window[-RECENT_STEPS:])
    assert copy.reference == watch.reference


def of_ranks(count: int, loss: float) -> MergedStep:
    present = frozenset(range(count))
    return replace(merged_step(1, loss=loss), world_size=8, present_ranks=present)


def test_the_loss_of_the_ranks_that_are_left_is_judged() -> None:
    """A node agent is dead: the ranks of the others lose what they had learned all the same."""
    watch = LossTracker()
    for loss in noisy(300):
        watch.fold(of_ranks(8, loss), THRESHOLDS)
    for loss in noisy(100, seed=1):
        watch.fold(of_ranks(4, loss), THRESHOLDS)
        assert not watch.spiking
    watch.fold(of_ranks(4, 50.0), THRESHOLDS)
    watch.fold(of_ranks(4, 50.0), THRESHOLDS)
    assert watch.spiking


def test_the_scatter_of_far_fewer_ranks_is_no_spike_and_becomes_usual() -> None:
    watch = LossTracker()
    for loss in noisy(300, scatter=0.01):
        watch.fold(of_ranks(8, loss), THRESHOLDS)
    for loss in noisy(300, scatter=0.3, seed=1):
        watch.fold(of_ranks(1, loss), THRESHOLDS)
        assert not watch.spiking
    for loss in (50.0, 50.0):
        watch.fold(of_ranks(1, loss), THRESHOLDS)
    assert watch.spiking


def shown(watch: LossTracker) -> LossHistory:
    return watch.view(AccountContext(THRESHOLDS, 120.0, Progress()))


def test_a_fall_is_measured_in_deviations_of_the_later_half():
    watch = LossTracker()
    losses = [*noisy(128, mean=2.0), *noisy(128, mean=1.5, seed=1)]
    fold(watch, *losses[:-1])
    assert shown(watch).fall is None
    fold(watch, losses[-1])
    before, recent = np.array(losses[:128]), np.array(losses[128:])
    assert shown(watch).fall == pytest.approx((before.mean() - recent.mean()) / recent.std())


def test_a_constant_loss_has_no_fall():
    watch = LossTracker()
    fold(watch, *[2.0] * WINDOW_STEPS)
    assert shown(watch).fall is None


@pytest.mark.parametrize(("end", "solved"), [(0.0, True), (1e-4, True), (0.02, False)])
def test_a_loss_that_is_next_to_nothing_of_the_first_one_is_solved(end, solved):
    watch = LossTracker()
    fold(watch, *noisy(100, mean=2.3), *[end] * 300)
    assert shown(watch).solved is solved


def test_a_loss_that_begins_small_is_not_solved():
    watch = LossTracker()
    fold(watch, *noisy(300, mean=1e-4, scatter=1e-6))
    assert not shown(watch).solved
