"""Learning rates that jump, and those whose warm-up was at a constant one."""

from random import Random

import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator
from mp_agent.node.accounting.counters import CounterStore
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
