"""Numbers that give away a clipping or a loss scale that no hook has seen."""

from collections.abc import Iterable, Mapping
from math import inf
from random import Random

import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.loss_scale import CLIPPED, SCALED, WINDOW_STEPS
from mp_agent.node.accounting.progress import Progress
from mp_agent.records.columns import GRADIENT_FACTOR, LOSS_FACTOR
from mp_agent.records.health import LossHistory
from tests.agent.node.builders import make_run_view, merged_step
from tests.subtests import each

STEPS = WINDOW_STEPS + 16


def account_of(steps: Iterable[dict[str, float]]) -> Accumulator:
    account = Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )
    random = Random(1)
    for sequence, values in enumerate(steps, 1):
        seen = {"norm": 1.0, "abs_max": random.uniform(0.1, 0.5), "loss": random.gauss(2.0, 0.05)}
        account.fold_step(merged_step(sequence, **{**seen, **values}))
    return account


def features(steps: Iterable[dict[str, float]]) -> tuple[str, ...]:
    return account_of(steps).progress.misreadings.features


class TestAConstantNorm:
    def test_of_gradients_that_differ_is_that_of_a_limit(self):
        account = account_of({} for _ in range(STEPS))

        assert account.progress.misreadings.features == (CLIPPED,)
        assert account.view(make_run_view(), 0.0).norms == {}

    def test_is_so_to_a_thousandth_and_on_most_steps(self):
        random = Random(2)
        within = [{"norm": random.uniform(0.9991, 1.0)} for _ in range(STEPS)]
        beyond = [{"norm": random.uniform(0.99, 1.0)} for _ in range(STEPS)]
        often = [{"norm": 0.3 if step % 3 == 0 else 1.0} for step in range(STEPS)]
        seldom = [{"norm": 0.3 if step % 2 == 0 else 1.0} for step in range(STEPS)]

        assert features(within) == (CLIPPED,)
        assert features(often) == (CLIPPED,)
        assert features(beyond) == features(seldom) == ()

    def test_of_a_gradient_that_is_constant_itself_is_none(self):
        assert features({"abs_max": 0.25} for _ in range(STEPS)) == ()

    def test_of_gradients_that_nothing_has_changed_is_none(self):
        assert features({GRADIENT_FACTOR: 1.0} for _ in range(STEPS)) == ()

    def test_that_higher_ones_exceed_is_none(self):
        """A limit has none above it."""
        assert features({"norm": 1.5 if step % 9 == 0 else 1.0} for step in range(STEPS)) == ()

    def test_of_steps_that_do_not_count_is_none(self):
        assert features({"nan_elements": 1.0} for _ in range(STEPS)) == ()
        assert features({"norm": 0.0, "abs_max": 0.0} for _ in range(STEPS)) == ()


def varied(values: Mapping[str, float], steps: int = STEPS) -> list[dict[str, float]]:
    """Return steps whose norms vary."""
    random = Random(3)
    return [{"norm": random.uniform(0.2, 0.9), **values} for _ in range(steps)]


class TestALossThatIsScaled:
    @pytest.mark.parametrize("factor", [2.0**-6, 2.0**-16, 3e-5, 1e-30])
    def test_is_one_whose_gradients_are_relieved_of_a_factor(self, factor):
        account = account_of(varied({GRADIENT_FACTOR: factor}))

        assert account.progress.misreadings.features == (SCALED,)
        view = account.view(make_run_view(), 0.0)
        assert view.loss == LossHistory()
        assert view.latest.loss is None

    @each("factor", [1.0, 0.5, 0.125, 1 / 63, 8.0, 65536.0, inf, 0.0])
    def test_is_none_whose_gradients_are_used_as_they_are_or_as_a_mean(self, factor):
        assert features(varied({GRADIENT_FACTOR: factor})) == ()

    def test_is_none_where_the_scale_is_known(self):
        assert features(varied({"loss_scale": 65536.0, GRADIENT_FACTOR: 2.0**-16})) == ()

    def test_is_seen_by_a_power_of_two_where_gradients_cannot_be_compared(self):
        assert features(varied({LOSS_FACTOR: 65536.0})) == (SCALED,)
        for factor in (32.0, 1000.0, 65537.0, 0.0):
            assert features(varied({LOSS_FACTOR: factor})) == ()

    def test_is_not_made_of_a_limit_far_below_the_norms(self):
        steps = [{GRADIENT_FACTOR: 1e-4} for _ in range(STEPS)]

        assert features(steps[: WINDOW_STEPS - 1]) == ()
        assert features(steps) == (CLIPPED,)

    def test_keeps_spikes_and_divergence_from_being_seen_in_its_movements(self):
        steps = varied({GRADIENT_FACTOR: 2.0**-16}, 400)
        for step, values in enumerate(steps):
            values["loss"] = 2.0 * 2.0 ** (step // 50)
        account = account_of(steps)

        assert not account.progress.losses.spiking
        assert account.view(make_run_view(), 0.0).loss.rising_steps == 0


def test_each_is_logged_once(caplog):
    steps = [{GRADIENT_FACTOR: 1e-4, LOSS_FACTOR: 65536.0} for _ in range(2 * STEPS)]

    assert features(steps) == (CLIPPED, SCALED)
    assert caplog.text.count(CLIPPED) == caplog.text.count(SCALED) == 1
