"""The factor of the learning rate over the updates after trouble."""

import pytest

from mp_agent.catalog.guard import POLICIES_BY_NAME
from mp_agent.probe.guard.learning_rate import RateReduction
from mp_agent.probe.guard.outcome import UpdateOutcome

CALM = UpdateOutcome(
    norm=1.0,
    limit=4.0,
    is_nonfinite=False,
    is_scaler_skip=False,
    is_spike=False,
    is_skipped=False,
    coefficient=1.0,
    is_none_left=False,
    is_failed=False,
)
BAD = CALM._replace(is_nonfinite=True)


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
