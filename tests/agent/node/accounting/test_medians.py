from statistics import median as plain_median
from sys import float_info

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_agent.node.accounting.windows import LARGEST, breadth_of_sorted, deviation, median

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


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=300),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_deviations_have_the_bits_of_sorted_distances_from_any_center(values, center):
    def middle(ordered):
        low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        mean = (low + high) / 2
        mean = mean if abs(mean) <= LARGEST else low / 2 + high / 2
        return ordered[len(ordered) // 2] if len(ordered) % 2 else mean

    assert median(values) == middle(sorted(values))
    distances = sorted(min(abs(value - center), LARGEST) for value in values)
    assert deviation(values, center) == middle(distances)


@given(_NUMBERS)
def test_breadth_is_that_of_the_outer_tenths_where_they_are_farther(values):
    ordered, center = sorted(values), median(values)
    tenth = len(values) // 10
    outer = ordered[-1 - tenth] / 3.8 - ordered[tenth] / 3.8

    assert breadth_of_sorted(ordered, center) == max(deviation(values, center), outer)
