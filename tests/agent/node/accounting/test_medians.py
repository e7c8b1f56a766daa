from statistics import median as plain_median
from sys import float_info

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_agent.node.accounting.medians import LARGEST, deviation, median, median_of_array

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


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=40, max_size=300))
def test_arrays_give_the_same_bits_as_lists(values):
    """Long windows are arrays; no number may depend on that."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    low, high = ordered[middle - 1 + len(ordered) % 2], ordered[middle]
    mean = (low + high) / 2
    center = mean if abs(mean) <= LARGEST else low / 2 + high / 2
    if len(ordered) % 2:
        center = ordered[middle]

    assert median(values) == center
    distances = [min(abs(value - center), LARGEST) for value in values]
    assert deviation(values, center) == median(sorted(distances))
    assert median_of_array(np.array(values)) == center
