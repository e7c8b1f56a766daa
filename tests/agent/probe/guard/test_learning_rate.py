"""The factor of the learning rate over the updates after trouble."""

import pytest

from mp_agent.catalog.guard import POLICIES_BY_NAME
from mp_agent.probe.guard.slow_policies import ObservedUpdate, RateReduction

CALM, BAD = ObservedUpdate(is_trouble=False), ObservedUpdate(is_trouble=True)


def test_the_rate_falls_stays_low_and_comes_back_in_equal_parts():
    defaults = POLICIES_BY_NAME["lower_learning_rate"].defaults
    reduction = RateReduction({**defaults, "troubles": 1.0, "hold_steps": 4.0})
    assert reduction.factor == 1.0
    assert reduction.observe(BAD)
    factors = [reduction.factor]
    for _ in range(9):
        assert not reduction.observe(CALM)
        factors.append(reduction.factor)
    expected = [0.1, 0.1, 0.1, 0.1, 0.1, 0.325, 0.55, 0.775, 1.0, 1.0]
    assert factors == pytest.approx(expected)


def test_steps_are_counted_where_several_optimizers_update():
    defaults = POLICIES_BY_NAME["lower_learning_rate"].defaults
    reduction = RateReduction({**defaults, "troubles": 1.0, "hold_steps": 2.0})
    assert reduction.observe(BAD)
    for begins_step in (False, True, False, True, False):
        assert not reduction.observe(CALM._replace(begins_step=begins_step))
    assert reduction.factor == pytest.approx(0.1)
    reduction.observe(CALM)
    assert reduction.factor == pytest.approx(0.55)
