"""What the loss had come down to, and whether it was lost; the losses go through the account."""

from copy import deepcopy
from functools import cache
from math import exp
from random import Random

import pytest
from pydantic import TypeAdapter

from mp_agent.catalog.metric import Scope
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.loss_reference import ACCEPT_STEPS, LossReference
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from tests.agent.node.builders import merged_step
from tests.subtests import each

SPIKES = BY_PROMETHEUS_NAME["mp_agent_loss_spike_steps_total"]


def context_of(run: "Run") -> AccountContext:
    return AccountContext(resolve({}), 120.0, run.account.progress)


class Run:
    """A run of one optimizer, step by step."""

    def __init__(self, noise: float = 0.02) -> None:
        self.random = Random(1)
        self.noise = noise
        counters = CounterStore(metrics={Scope.RUN: (SPIKES,)})
        self.account = Accumulator(
            resolve({}), progress=Progress(), counters=counters, window_seconds=120.0
        )

    def train(self, steps: int, first: float, last: float, **columns: float) -> "Run":
        """Go through so many steps while the loss goes from one level to the other."""
        for step in range(steps):
            level = first + (last - first) * step / steps
            norm = columns.get("norm", 1.0) * self.random.lognormvariate(0, 0.2)
            values = {"learning_rate": 1e-3, "nan_elements": 0.0, "elements": 9.0, **columns}
            loss = level + self.random.gauss(0, self.noise)
            self.account.fold_step(merged_step(1, **{**values, "norm": norm, "loss": loss}))
        return self

    @property
    def reference(self) -> LossReference:
        return self.account.progress.losses.reference

    @property
    def lost(self) -> bool:
        return self.reference.lost_steps > 0


@cache
def _learned(noise: float) -> Run:
    return Run(noise).train(1000, 10.0, 2.6).train(500, 2.6, 2.6)


def learned(noise: float = 0.02) -> Run:
    return deepcopy(_learned(noise))


@pytest.mark.slow
def test_a_run_that_an_explosion_threw_back_is_lost_for_good():
    run = learned().train(3000, 300.0, 300.0, norm=4000.0)
    assert run.lost and run.reference.best == pytest.approx(2.6, abs=0.05)
    assert not learned().lost


@pytest.mark.slow
@pytest.mark.parametrize("factor", [4.0, 9.0])
def test_so_is_one_whose_loss_went_up_with_a_rate_clearly_above_all_before(factor: float):
    """Less than a jump by itself, with norms that are hardly larger than usual."""
    run = learned().train(3000, 9.5, 9.5, norm=3.0, learning_rate=factor * 1e-3)
    assert run.lost
    assert not learned().train(3000, 9.5, 9.5, norm=3.0).lost


@pytest.mark.slow
def test_a_rate_that_rises_while_the_loss_goes_on_loses_nothing():
    assert not learned().train(3000, 2.6, 2.4, learning_rate=9e-3).lost


def test_nor_does_a_second_stage_that_warms_up_to_a_higher_rate():
    run = learned()
    for step in range(100):
        run.train(1, 3.6, 3.6, learning_rate=1e-3 * (1 + 0.04 * step))
    assert not run.train(1000, 3.6, 3.0, learning_rate=5e-3).lost


@pytest.mark.slow
def test_so_is_one_whose_norms_came_back_to_normal_and_whose_loss_did_not():
    run = learned().train(20, 50.0, 50.0, norm=4000.0).train(3000, 8.0, 7.0)
    assert run.lost


def test_a_learning_rate_that_jumped_is_reason_enough():
    assert learned().train(400, 30.0, 30.0, learning_rate=3.0).lost


def test_it_takes_some_losses_and_no_time():
    run = learned().train(20, 300.0, 300.0, norm=4000.0)
    assert not run.lost
    assert run.train(10, 300.0, 300.0, norm=4000.0).lost


@each("noise", [0.02, 0.08])
@each("steps", [12, 40, 120])
def test_a_loss_that_has_doubled_is_lost_within_thirty_losses(noise: float, steps: int):
    """Whether it has stopped there or rises on, and before there are 64 losses too."""
    for run in (learned(noise), Run(noise).train(40, 10.0, 2.6).train(8, 2.6, 2.6)):
        run.train(steps, 2.6, 5.2)
        assert not run.lost
        assert run.train(30, 5.6, 5.6).lost


def test_so_is_one_that_scatters_about_twice_its_best():
    run = learned().train(20, 2.6, 5.2)
    for level, steps in ((5.6, 8), (5.05, 6), (5.6, 14)):
        run.train(steps, level, level)
    assert run.lost


def test_so_is_one_that_leapt_when_the_rate_jumped_and_doubled_only_later():
    run = learned().train(30, 4.5, 5.1, learning_rate=3.0)
    assert not run.lost
    assert run.train(36, 5.1, 7.0, learning_rate=3.0).lost


def test_one_that_doubles_and_falls_again_is_not_nor_is_one_that_never_fell():
    for decay_steps in (30, 100, 200):
        run = learned().train(20, 2.6, 9.0)
        for step in range(300):
            level = 2.6 + 6.4 * exp(-step / decay_steps)
            assert not run.train(1, level, level).lost, (decay_steps, step)
    assert not Run().train(500, 2.1, 2.1).train(60, 2.1, 5.0).train(40, 5.0, 5.0).lost


@pytest.mark.parametrize("breadth", [0.3, 0.6])
def test_a_loss_that_wanders_has_lost_nothing(breadth: float):
    run, random, wandering = Run(0.05).train(300, 4.0, 1.0), Random(3), 0.0
    for step in range(3000):
        wandering += random.gauss(0.0, breadth / 5) - wandering / 25
        level = 1.5 * exp(wandering)
        assert not run.train(1, level, level).lost, step


def episodes(run: Run, steps: int, level: float, zero: float = 0.0) -> None:
    """Go through losses that are sums over episodes of any length, some of them below 0."""
    for _ in range(steps):
        loss = level * run.random.lognormvariate(0, 1.0) - zero * level * run.random.random()
        run.train(1, loss, loss, norm=3 * abs(loss) + 1.0)


@each("seed", range(4))
@each("zero", [0.0, 1.0])
def test_a_loss_that_multiplied_from_the_beginning_has_lost_nothing(seed, zero):
    """Episodes become longer as a policy gets better, and the sums over them larger."""
    run = Run(0.0)
    run.random.seed(seed)
    for level in (12.0, 30.0, 0.5, 0.1, 0.5, 20.0, 110.0):
        episodes(run, 80, level, zero)
        progress = run.account.progress
        assert progress.losses.multiplies and not run.lost
        assert not progress.losses.rising_steps and not progress.relapse.steps
        assert progress.losses.view(context_of(run)).best is None
        assert progress.norm_growth.growth == 0.0
    assert run.account.counters.total(SPIKES, ()) == 0


def test_another_task_is_learned_like_the_one_before_and_one_that_stays_high_is_lost():
    """The norm jumps with the loss, by less than an alert on it requires."""
    run = Run(0.005).train(200, 2.4, 0.02).train(200, 0.02, 0.02)
    for step in range(400):
        level = 0.02 + 2.6 * exp(-step / 60)
        assert not run.train(1, level, level, norm=1.0 + 60.0 * exp(-step / 60)).lost, step
    run = Run(0.005).train(200, 2.4, 0.02).train(200, 0.02, 0.02)
    assert run.train(200, 2.5, 2.4, norm=30.0).lost


def test_one_that_only_multiplies_when_it_is_small_had_a_level_to_lose():
    """As labelled data that are nearly learned, of which few batches have a loss at all."""
    run = Run(0.05).train(200, 2.3, 0.1)
    episodes(run, 400, 0.05)
    assert not run.account.progress.losses.multiplies and not run.lost
    assert run.train(400, 4.0, 4.0, norm=900.0).lost


def test_one_that_falls_fast_at_first_has_a_level_to_lose():
    """As of a regression without noise."""
    run = Run(1e-7)
    for step in range(40):
        level = 1e-5 + 1e3 * 0.45**step
        run.train(1, level, level)
    run.train(300, 1e-5, 1e-5)
    assert not run.account.progress.losses.multiplies and not run.lost
    assert run.train(300, 40.0, 40.0, norm=900.0).lost


def test_one_that_leaps_from_the_first_steps_on_is_judged():
    """As at a learning rate that is far too high."""
    run, exploded = Run(0.005).train(16, 2.3, 2.1), 0
    for step in range(40):
        level = 2.1 * 2.5 ** min(step, 24)
        run.train(1, level, level, norm=level)
        exploded += bool(run.account.progress.norms.exploded)
    assert not run.account.progress.losses.multiplies
    assert exploded


@pytest.mark.parametrize("steps", [400, 1600])
def test_squared_errors_that_grow_with_their_scatter_are_of_values_that_grow(steps):
    """Of temporal differences: the target rises as the policy gets better."""
    run = Run(0.0)
    for level in [*(0.6 - 0.48 * k / 80 for k in range(80)), *[0.12] * 300]:
        run.train(1, loss := level * run.random.lognormvariate(0, 0.4), loss)
    for step in range(3 * steps):
        level = 0.12 * 25 ** min(1.0, step / steps)
        run.train(1, loss := level * run.random.lognormvariate(0, 0.4), loss)
        assert not run.lost and not run.account.progress.losses.rising_steps, step


def test_it_is_over_when_the_loss_has_recovered():
    run = learned().train(400, 50.0, 50.0, norm=4000.0)
    assert run.lost
    assert not run.train(800, 50.0, 2.7).train(300, 2.7, 2.7).lost


@pytest.mark.slow
def test_a_loss_that_creeps_back_to_where_it_began_is_lost_without_any_explosion():
    run = Run(0.4).train(1000, 10.0, 5.2).train(500, 5.2, 5.2).train(2500, 5.2, 9.2)
    assert not run.lost
    assert run.train(900, 10.3, 11.0).lost


def test_a_loss_that_more_than_doubles_and_stays_is_lost_however_fast_it_got_there():
    """As in pure BF16: norms are as usual, and nothing came before."""
    for steps in (10, 30, 300, 2000):
        run = learned().train(steps, 2.6, 7.5)
        assert run.train(300, 7.5, 7.5).lost, steps


def test_so_is_that_of_a_resumed_run_that_never_fell_unless_it_rises_slowly():
    assert Run().train(1000, 2.1, 2.1).train(300, 2.1, 7.5).train(200, 7.5, 7.5).lost
    assert not Run().train(1000, 2.1, 2.1).train(3000, 2.1, 7.5).train(200, 7.5, 7.5).lost


def test_a_climb_to_less_than_double_or_one_that_heals_is_not_lost():
    assert not learned().train(300, 2.6, 5.0).train(500, 5.0, 5.0).lost
    run = learned().train(20, 2.6, 7.5)
    for step in range(600):
        level = 2.6 + 4.9 * exp(-step / 200)
        assert not run.train(1, level, level).lost, step


@pytest.mark.parametrize("noise", [0.02, 0.15])
@pytest.mark.parametrize("steps", [2400, 9600])
def test_a_loss_that_creeps_up_by_half_as_against_a_critic_has_lost_nothing(
    noise: float, steps: int
):
    run = Run(noise).train(500, 2.3, 1.4)
    for part in range(8):
        run.train(steps // 8, 1.4 + part / 10, 1.5 + part / 10)
        assert not run.lost, part


def test_nor_has_one_that_doubles_while_another_model_is_trained_in_turn():
    """As far as that is known: by a second optimizer that is not of this model."""
    run = learned()
    run.reference.other_models = True
    assert not run.train(2000, 2.6, 9.9).train(500, 9.9, 9.9).lost


def test_a_restart_of_the_schedule_explains_a_climb_for_a_while():
    run = learned().train(100, 2.6, 2.6, learning_rate=1e-5)
    assert not run.train(60, 2.6, 5.6).train(400, 5.6, 5.6).lost
    assert run.train(200, 5.6, 5.6).lost, "it does not come back"
    later = learned().train(100, 2.6, 2.6, learning_rate=1e-5).train(600, 2.6, 2.6)
    assert later.train(60, 2.6, 5.6).train(300, 5.6, 5.6).lost


def test_after_a_restart_a_loss_may_come_back_slowly():
    run = learned().train(100, 2.6, 2.6, learning_rate=1e-5).train(60, 2.6, 5.6)
    for part in range(15):
        assert not run.train(100, 5.6 - 0.2 * part, 5.4 - 0.2 * part).lost


@each("at", [10, 20, 45, 60, 63, 70])
def test_a_divergence_among_the_first_losses_is_not_what_is_usual(at: int):
    run = Run(1.0).train(at, 30.0, 22.0)
    for loss in (22.0, 612.0, 4022.0):
        run.train(1, loss, loss)
    for step in range(140):
        level = 55.0 + 300 * exp(-step / 10)
        run.train(1, level, level)
    assert run.lost and run.reference.best == pytest.approx(26.0, abs=3.0)
    assert run.account.counters.total(SPIKES, ()) > 0


@pytest.mark.parametrize("losses", [(30.0, 22.0), (0.0, 0.0), (0.01, 0.03), (11.0, 4.0)])
def test_a_calm_beginning_brings_neither_spike_nor_loss(losses: tuple[float, float]):
    run = Run(losses[1] / 10).train(64, *losses).train(200, losses[1], losses[1])
    assert not run.lost
    assert run.account.counters.total(SPIKES, ()) == 0


@pytest.mark.slow
def test_harder_data_are_a_new_normal_and_what_is_lost_from_there_is_seen():
    run = learned().train(ACCEPT_STEPS + 400, 5.0, 5.0)
    assert not run.lost
    assert run.reference.best == pytest.approx(5.0, abs=0.1)
    assert run.train(300, 300.0, 300.0, norm=4000.0).lost


@pytest.mark.slow
def test_one_more_loss_term_is_no_loss_of_what_was_learned():
    assert not learned().train(4000, 25.0, 24.0, norm=4.0).lost


@pytest.mark.slow
def test_a_spike_that_heals_is_none():
    run = learned().train(20, 9.0, 9.0, norm=4000.0).train(200, 3.0, 2.6).train(500, 2.6, 2.6)
    assert not run.lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "first", "last"),
    [(0.5, 0.0, 0.0), (0.001, 0.0, 0.04), (1e-9, 0.0, 0.0), (0.0, 0.0, 0.04)],
)
def test_losses_about_0_that_rise_by_design_have_lost_nothing(noise, first, last):
    run = Run(noise).train(300, first, first).train(10, first, first, norm=30.0)
    assert not run.train(1500, first, last).lost


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_negative_loss_is_judged_like_any_other(sign):
    run = Run(0.005).train(1000, -0.5, -0.78).train(500, -0.78, -0.78)
    assert not run.lost
    assert run.train(400, sign * 0.3, sign * 0.3, norm=900.0).lost


def test_a_restart_starts_over():
    run = learned().train(400, 50.0, 50.0, norm=4000.0)
    run.account.begin_attempt()
    assert not run.lost and run.reference.best is None


def test_it_goes_through_the_ledger():
    reference = learned().reference
    adapter = TypeAdapter(LossReference)
    assert adapter.validate_json(adapter.dump_json(reference)) == reference


@pytest.mark.slow
def test_a_curriculum_of_several_jumps_is_no_creeping():
    """Each stage begins higher than the one before ended, and is then learned."""
    run = Run(0.05)
    for stage in range(5):
        base = 1.0 + 0.45 * stage
        for part in range(10):
            first, last = (base + exp(-(part + more) / 2) for more in (0, 1))
            run.train(100, first, last)
            assert not run.lost, (stage, part)


@pytest.mark.slow
def test_losses_of_which_many_are_exactly_0_lose_nothing():
    """Triplets that are all told apart: the median may be 0 by chance, and is not for long."""
    run, random = Run(0.0).train(500, 0.3, 0.2), Random(7)
    for _ in range(3000):
        loss = 0.0 if random.random() < 0.45 else 0.3 * random.random()
        run.train(1, loss, loss, norm=loss * 3 + 1e-9)
        assert not run.lost
