"""Each condition's thresholds move it the way that they say, within what can be had."""

import pytest

from mp_agent.alerting.backtesting import Knob
from mp_agent.alerting.values import values_in_force
from mp_agent.backtest.tuning import KNOBS, can_be_had, stricter
from mp_agent.catalog.thresholds import BY_NAME, DEFAULTS


@pytest.mark.parametrize("factor", [1.001, 1.1, 3.0, 100.0])
def test_a_move_is_never_smaller_than_asked_for(factor: float) -> None:
    for knobs in KNOBS.values():
        for knob in knobs:
            for name, value in knob.moved(DEFAULTS, factor).items():
                asked = DEFAULTS[name] * factor if knob.raised else DEFAULTS[name] / factor
                if BY_NAME[name].unit == "1":
                    asked = min(asked, 1.0)
                if BY_NAME[name].unit in ("{step}", "{change}"):
                    assert value == int(value)
                further = value >= asked * (1 - 1e-9) if knob.raised else value <= asked * 1.000001
                assert further, (name, value, asked)


def test_a_move_to_the_sensitive_side_stays_possible() -> None:
    values = values_in_force()
    for factor in (1.25, 2.0, 1000.0):
        assert can_be_had(values, stricter(values, factor, KNOBS))


def test_severe_limits_stay_beyond_mild_ones() -> None:
    assert not can_be_had(values_in_force(), {"grad_norm_high": 2000.0})
    assert not can_be_had(values_in_force(), {"loss_deviation_floor": 2.0})


def test_what_is_counted_is_never_less_than_one() -> None:
    knob = Knob(("nonfinite_gradients",))
    assert knob.moved(DEFAULTS, 1 / 1000) == {"nonfinite_gradients": 1.0}
