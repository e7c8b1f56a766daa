from statistics import median as plain_median
from sys import float_info

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_agent.node.accounting.medians import deviation, median

_NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(_NUMBERS)
def test_median_and_deviation_are_those_of_the_textbook(values):
    center = median(values)

    assert center == pytest.approx(plain_median(values))
    assert deviation(values, center) == pytest.approx(
        plain_median([abs(value - center) for value in values])
    )


@pytest.mark.parametrize(
    ("values", "expected"), [([3.0], (3.0, 0.0)), ([2.0] * 9, (2.0, 0.0)), ([1.0, 4.0], (2.5, 1.5))]
)
def test_one_value_and_equal_values_have_no_deviation(values, expected):
    assert (median(values), deviation(values, median(values))) == expected


def test_values_near_the_end_of_float64_stay_finite():
    largest = float_info.max

    assert median([largest, largest]) == largest
    assert deviation([-largest, largest, largest], largest) == 0.0
    assert deviation([-largest, -largest, largest], largest) == largest


def test_of_nothing_there_is_no_median():
    with pytest.raises(ValueError, match="no values"):
        median([])
