"""A ratio and an index in one number, of which the maximum is taken."""

from math import isfinite
from sys import float_info

import pytest

from mp_agent.records.tensor_collections import SLICES_AT_MOST, index_of, packed, ratio_of
from tests.subtests import each


@each("ratio", [1.0, 1.5, 12_345.678, 3e38, float_info.max])
@each("index", [0, 1, SLICES_AT_MOST - 1])
def test_both_come_back(ratio, index):
    value = packed(ratio, index)

    assert isfinite(value)
    assert index_of(value) == index
    assert ratio_of(value) == pytest.approx(ratio, rel=2.0**-31)


def test_the_larger_ratio_wins_whatever_the_indices():
    assert max(packed(2.0, SLICES_AT_MOST - 1), packed(2.001, 0)) == packed(2.001, 0)


def test_of_equal_ratios_the_higher_index_wins():
    assert max(packed(7.0, 3), packed(7.0, 4)) == packed(7.0, 4)
