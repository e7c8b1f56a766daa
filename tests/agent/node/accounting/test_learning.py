"""Learning rates that jump, and those whose warm-up was at a constant one."""

from collections.abc import Iterable
from dataclasses import replace
from math import cos, inf, pi
from random import Random

import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from tests.agent.node.builders import merged_step

LOW, FULL = 1e-6, 1e-4


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def jumps(account: Accumulator, steps: int, rate: float, loss: float = 2.0) -> int:
    random, found = Random(str(rate)), 0
    for _ in range(steps):
        values = {"norm": 1.0, "loss": random.gauss(loss, 0.05), "learning_rate": rate}
        account.fold_step(merged_step((last_of(account) or 0) + 1, **values))
        found += account.progress.learning.rate_jumped
    return found


def last_of(account: Accumulator) -> int | None:
    return account.progress.last.sequence if account.progress.last else None


def test_the_end_of_a_warm_up_at_a_constant_rate_is_no_jump(account: Accumulator) -> None:
    assert jumps(account, 400, LOW) == 0
    assert jumps(account, 400, FULL) == 0


def test_it_is_one_if_the_loss_follows(account: Accumulator) -> None:
    assert jumps(account, 400, LOW) == 0
    assert jumps(account, 100, FULL, loss=40.0) == 1


@pytest.mark.parametrize("rates", [(LOW, LOW * 2, FULL), (FULL, LOW, 3000 * FULL)])
def test_a_rate_that_had_changed_before_has_no_warm_up(
    account: Accumulator, rates: tuple[float, ...]
) -> None:
    *before, last = rates
    for rate in before:
        assert jumps(account, 200, rate) == 0
    assert jumps(account, 10, last) == 1


def test_a_rate_that_was_constant_for_long_was_no_warm_up(account: Accumulator) -> None:
    assert jumps(account, 1500, LOW) == 0
    assert jumps(account, 10, FULL) == 1


def rises(account: Accumulator, steps: int) -> int:
    return sum(jumps(account, 1, FULL * step / steps) for step in range(1, steps + 1))


def test_a_rate_that_rose_step_by_step_jumps_within_the_first_hundred_steps(
    account: Accumulator,
) -> None:
    assert rises(account, 16) == 0
    assert jumps(account, 20, FULL) == 0
    assert jumps(account, 20, 10 * FULL) == 1


def test_a_few_rises_are_a_warm_up_that_may_go_on_by_more(account: Accumulator) -> None:
    assert rises(account, 15) == 0
    assert jumps(account, 20, 10 * FULL) == 0


def test_a_rate_that_doubles_at_every_step_is_a_search_for_one(account: Accumulator) -> None:
    assert sum(jumps(account, 1, LOW * 2**step) for step in range(60)) == 0


def spikes(account: Accumulator, levels: list[tuple[int, float, float]]) -> float:
    """Go through steps at each loss and rate; return how many belong to a spike."""
    random, sequence = Random(1), 0
    for steps, loss, rate in levels:
        for _ in range(steps):
            sequence += 1
            values = {"norm": 1.0, "loss": random.gauss(loss, 0.02), "learning_rate": rate}
            account.fold_step(merged_step(sequence, **values))
    return account.counters.total(BY_PROMETHEUS_NAME["mp_agent_loss_spike_steps_total"], ())


def test_a_restart_explains_it_for_a_while_only(account: Accumulator) -> None:
    cycle = [(300, 1.0, FULL), (300, 0.9, FULL / 20)]
    assert spikes(account, [*cycle, (200, 2.6, FULL)]) == 0
    assert spikes(account, [(200, 2.6, FULL)]) > 50
    assert spikes(account, [(3000, 2.6, FULL)]) <= 256


def test_a_restart_of_the_schedule_explains_a_higher_loss(account: Accumulator) -> None:
    cycle = [(300, 1.0, FULL), (300, 0.8, FULL / 20)]
    assert spikes(account, [*cycle, (60, 1.2, FULL), (300, 0.9, FULL)]) == 0


@pytest.mark.parametrize(
    "levels",
    [
        [(600, 0.8, FULL), (60, 1.2, FULL)],
        [(600, 0.8, 0.0), (60, 1.2, 0.0)],
        [(100, 0.8, FULL), *[(10, 0.8, FULL / 9), (10, 0.8, FULL)] * 26, (60, 1.2, FULL)],
    ],
    ids=["constant rate", "rate 0", "a rate that goes up and down all the time"],
)
def test_without_one_it_is_a_spike(
    account: Accumulator, levels: list[tuple[int, float, float]]
) -> None:
    assert spikes(account, levels) > 0


def untrained(
    account: Accumulator, steps: int, **columns: float | tuple[float, float]
) -> dict[str, int]:
    """Go through steps with these values; a pair is the middle of a range and its half width."""
    random = Random(2)
    for _ in range(steps):
        drawn = {
            name: random.uniform(value[0] - value[1], value[0] + value[1])
            if isinstance(value, tuple)
            else value
            for name, value in {
                "norm": (1.0, 0.1), "loss": (2.0, 0.1), "learning_rate": FULL, **columns
            }.items()
        }  # fmt: skip
        step = {"nan_elements": 0.0, "elements": 9.0, **drawn}
        account.fold_step(merged_step((last_of(account) or 0) + 1, **step))
    return dict(account.progress.learning.view().untrained)


def test_a_best_level_that_still_follows_earlier_losses_proves_nothing(
    account: Accumulator,
) -> None:
    for level in (3.0, 2.5, 2.0, 1.5, 1.0):
        untrained(account, 20, loss=(level, 0.01))
    found = untrained(account, 100, loss=(1.0, 0.01), learning_rate=0.0)
    assert found["learning rate 0"] == 100


def test_a_loss_that_falls_to_exactly_0_for_good(account: Accumulator) -> None:
    assert untrained(account, 50) == {}
    assert untrained(account, 80, loss=0.0) == {"loss 0": 80}
    assert untrained(account, 20, loss=0.0, norm=1.0)["loss 0"] == 100
    assert untrained(account, 1) == {}


def losses_without_gradients(account: Accumulator, *losses: float) -> dict[str, int]:
    for loss in losses:
        step = merged_step((last_of(account) or 0) + 1, loss=loss)
        account.fold_step(replace(step, families={}, gradients_observed=False))
    return dict(account.progress.learning.view().untrained)


def test_a_loss_that_is_0_at_once_is_nan_where_no_gradients_are_seen(
    account: Accumulator,
) -> None:
    """As Transformers logs it."""
    found = losses_without_gradients(account, *(1.5, 1.2, 1.8) * 20, *[0.0] * 60)
    assert found == {"loss 0 at once": 60}


@pytest.mark.parametrize("lowest", [0.1, 1e-4])
def test_a_loss_that_was_near_0_before_may_be_learned(account: Accumulator, lowest: float) -> None:
    """As one that is rounded to four decimals, or a hinge loss."""
    found = losses_without_gradients(account, *[1.5] * 20, *[lowest] * 20, *[0.0] * 60)
    assert found == {"loss 0": 60}


def test_a_loss_that_leaves_0_is_not_nan(account: Accumulator) -> None:
    """As that of triplets, few of which violate their margin."""
    losses = ((1.5, 1.2, 1.8) * 20, [0.0] * 30, [1.4], [0.0] * 60)
    assert losses_without_gradients(account, *(each for some in losses for each in some)) == {
        "loss 0": 60
    }


@pytest.mark.parametrize("least", [0.1, 1.0])
def test_a_loss_in_few_digits_is_rounded_to_0(account: Accumulator, least: float) -> None:
    losses = [least * each for each in (9, 8, 7, 6, 5, 4, 3, 2, 3, 2, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1)]
    assert losses_without_gradients(account, *losses, *[0.0] * 60) == {"loss 0": 60}


@pytest.mark.parametrize("extreme", [inf, 1e308, 5e-324])
def test_extreme_losses_before_a_loss_of_0_fail_nothing(
    account: Accumulator, extreme: float
) -> None:
    losses = [2.5 + 0.01 * each for each in range(20)]
    found = losses_without_gradients(account, *losses, extreme, 2.7, *[0.0] * 60)
    assert found == {"loss 0" if extreme < 1.0 else "loss 0 at once": 60}


def test_zero_gradients_and_nan_are_the_better_reason_for_a_loss_of_0(account: Accumulator) -> None:
    untrained(account, 50)
    assert untrained(account, 70, loss=0.0, norm=0.0) == {"all gradients 0": 70}
    assert untrained(account, 70, loss=0.0, nan_elements=3.0) == {
        "loss 0 with non-finite gradients": 70
    }


@pytest.mark.parametrize("beginning", [0.0, -1e-9])
def test_a_loss_that_begins_at_0_may_return_there(account: Accumulator, beginning: float) -> None:
    """As that of GRPO, whose advantages have a mean of 0."""
    untrained(account, 5, loss=beginning)
    untrained(account, 200, loss=(1e-4, 1e-5))
    assert untrained(account, 900, loss=0.0) == {}


def test_a_loss_and_a_norm_that_are_the_same_on_every_step(account: Accumulator) -> None:
    untrained(account, 50)
    found = untrained(account, 65, loss=1.25, norm=1.0)
    assert found == {"constant loss and gradient norm": 64}
    assert untrained(account, 10, loss=1.25) == {"constant loss": 74}
    assert untrained(account, 900, loss=(1.25, 0.1), norm=1.0) == {}


def test_a_loss_that_stays_at_ln_2(account: Accumulator) -> None:
    assert untrained(account, 601, loss=(0.693147, 1e-6)) == {"constant loss": 600}
    assert untrained(account, 600, loss=(0.693147, 1e-3)).get("constant loss", 0) < 20


def test_a_loss_that_drifts_slowly_is_not_constant(account: Accumulator) -> None:
    for step in range(600):
        found = untrained(account, 1, loss=2.0 - step * 1e-5)
        assert found.get("constant loss", 0) < 30


@pytest.mark.parametrize(
    ("rate", "all_0", "reason"),
    [
        (0.0, 1.0, "all learning rates 0"),
        (0.0, 0.0, "learning rate 0"),
        (0.1, 1.0, None),
    ],
    ids=["of all groups of all ranks", "of the first group", "of one rank alone"],
)
def test_learning_rates_are_0_where_no_rank_has_another(
    account: Accumulator, rate: float, all_0: float, reason: str | None
) -> None:
    found = untrained(account, 100, learning_rate=rate, learning_rates_zero=all_0)
    assert found == ({} if reason is None else {reason: 100})


def test_a_learning_rate_of_0_unless_the_loss_falls_all_the_same(account: Accumulator) -> None:
    assert untrained(account, 100, learning_rate=0.0) == {"learning rate 0": 100}
    for step in range(100):
        found = untrained(account, 1, learning_rate=0.0, loss=(2.0 - step / 100, 0.01))
    assert found == {}
    untrained(account, 200, loss=(1.0, 0.01))
    assert untrained(account, 400, learning_rate=0.0, loss=(1.0, 0.02)) == {"learning rate 0": 400}


CLIPPED = {"gradients clipped to almost 0": 100}


@pytest.mark.parametrize(
    ("limit", "norm", "found"),
    [
        (1e-8, 0.5, CLIPPED),
        (1e-6, 0.5, CLIPPED),
        (1e-4, 0.5, {}),
        (1e-6, 1e-5, {}),
        (-1.0, 0.5, {}),
    ],
    ids=["an epsilon", "almost 0", "a small limit", "small gradients", "below 0"],
)
def test_clipping_to_almost_0_trains_nothing_unless_the_loss_falls(
    account: Accumulator, limit: float, norm: float, found: dict[str, int]
) -> None:
    clips = {"clip_max_norm": limit, "clip_norm": norm}
    assert untrained(account, 100, **clips) == found
    for step in range(100):
        last = untrained(account, 1, loss=(2.0 - step / 100, 0.01), **clips)
    assert last == {}


def mistakes(account: Accumulator, steps: int, **columns: float) -> dict[str, int]:
    """Return the mistakes of the loop after so many more steps with these columns."""
    for _ in range(steps):
        account.fold_step(merged_step((last_of(account) or 0) + 1, norm=1.0, **columns))
    return dict(account.progress.loop.view().steps)


def test_mistakes_of_the_loop_count_in_a_row_each_by_itself(account: Accumulator) -> None:
    assert mistakes(account, 5, gradients_add_up=1.0) == {"gradients add up": 5}
    both = mistakes(account, 3, gradients_add_up=1.0, left_in_evaluation=1.0)
    assert both == {"gradients add up": 8, "evaluation mode": 3}
    assert mistakes(account, 2, skipped=1.0) == both
    assert mistakes(account, 1) == {}


def test_backwards_before_gradients_of_the_script_itself_were_of_use(account: Accumulator) -> None:
    discarded = {"backwards_discarded": 3.0}
    assert mistakes(account, 2, gradient_factor=1.0, **discarded) == {"gradients discarded": 2}
    assert mistakes(account, 1, gradient_factor=0.5, **discarded) == {}


def test_only_samples_count_for_autocast_without_effect(account: Accumulator) -> None:
    mistakes(account, 2, autocast_fp32_share=1.0)
    mistakes(account, 5)
    assert account.progress.loop.view().fp32_samples == 2
    mistakes(account, 1, autocast_fp32_share=0.5)
    assert account.progress.loop.view().fp32_samples == 0


def falls(account: Accumulator, rates: Iterable[float]) -> list[tuple[int, int | None]]:
    """Return on which steps a fall of the rate is found, each with the step that it began at."""
    found = []
    for rate in rates:
        number = (last_of(account) or 0) + 1
        account.fold_step(merged_step(number, loss=2.0, learning_rate=rate))
        fall = account.progress.rate_fall
        found += [(number, fall.begin_step)] if fall.found else []
    return found


def test_a_rate_that_halves_at_every_step_has_fallen(account: Accumulator) -> None:
    assert falls(account, (0.1 * 0.5**step for step in range(200))) == [(26, 11)]


def test_one_that_falls_tenfold_every_ten_steps_has_fallen(account: Accumulator) -> None:
    [(found, begin)] = falls(account, (0.1 * 0.1 ** (step // 10) for step in range(100)))
    assert begin is not None
    assert begin <= 41
    assert found == begin + 15


@pytest.mark.parametrize("steps", [40, 64, 100, 400])
@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_schedules_that_end_with_the_run_have_not(
    account: Accumulator, steps: int, power: float
) -> None:
    cosine = [0.1 * (1 + cos(pi * step / steps)) / 2 for step in range(steps + 100)]
    straight = [0.1 * max(0.0, 1 - step / steps) ** power for step in range(steps + 100)]
    assert falls(account, cosine[: steps + 1]) == []
    assert falls(account, straight) == []


def test_nor_has_the_rate_of_a_training_after_a_search_for_one(account: Accumulator) -> None:
    search = [1e-7 * 1.3**step for step in range(70)]
    assert falls(account, [*search, *[1e-3] * 100]) == []


def test_a_rate_of_0_is_another_matter(account: Accumulator) -> None:
    assert falls(account, [0.1] * 10 + [0.0] * 200) == []


def test_norms_of_0_in_a_log_whose_loss_falls_are_norms_that_its_writer_did_not_see(
    account: Accumulator,
) -> None:
    for level in (9.0, 7.0, 5.0, 4.0, 3.0, 2.0):
        found = untrained(account, 20, loss=(level, 0.01), norm=0.0)
    assert found == {}
