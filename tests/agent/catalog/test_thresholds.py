import pytest

from mp_agent.catalog.thresholds import BY_NAME, DEFAULTS, THRESHOLDS, bound_label, resolve
from mp_agent.errors import SettingError
from tests.subtests import each


def test_names_are_unique_and_what_one_must_be_below_exists_and_is_above():
    assert len(BY_NAME) == len(THRESHOLDS)
    for threshold in THRESHOLDS:
        if threshold.below:
            assert threshold.value < DEFAULTS[threshold.below]


def test_units_are_shares_or_things():
    for threshold in THRESHOLDS:
        assert threshold.unit == "1" or threshold.unit[0] + threshold.unit[-1] == "{}"
        assert threshold.unit != "1" or threshold.value <= 1


@each(
    ("overrides", "message"),
    [
        ({"nap": 1.0}, "'nap' is unknown; known: grad_norm_high"),
        ({"grad_norm_high": -1.0}, "grad_norm_high has value -1.0; it must be above 0"),
        ({"grad_norm_high": 0.0}, "grad_norm_high has value 0.0; it must be above 0"),
        ({"straggler_ratio": float("nan")}, "straggler_ratio has value nan"),
        ({"straggler_ratio": float("inf")}, "straggler_ratio has value inf"),
        ({"overflow_warning": 1.5}, "overflow_warning has value 1.5; it is a share, at most 1"),
        ({"grad_norm_high": 2000.0}, "must be below grad_norm_extreme, which is 1000.0"),
        ({"overflow_critical": 0.005}, "overflow_warning has value 0.01; it must be below"),
    ],
)
def test_a_wrong_value_is_refused_by_name_and_value(overrides, message):
    with pytest.raises(SettingError, match=message):
        resolve(overrides)


def test_limits_that_belong_together_can_be_moved_together():
    moved = resolve({"grad_norm_high": 2000.0, "grad_norm_extreme": 5000.0})

    assert (moved["grad_norm_high"], moved["grad_norm_extreme"]) == (2000.0, 5000.0)
    assert resolve({}) == DEFAULTS


def test_a_bound_is_written_without_needless_digits():
    assert [bound_label(value) for value in (100.0, 0.001, 1e-6)] == ["100", "0.001", "1e-06"]
