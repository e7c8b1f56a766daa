"""Ratios and differences, against brute force."""

from math import comb, inf, nan

import pytest

from mp_agent.plan.evaluation.model import paired_ratio, relative_differences, tail_difference
from tests.subtests import each


def coverage(count, low, high):
    """Return the probability that the true median lies between two order statistics (from 0)."""
    return sum(comb(count, below) for below in range(low + 1, high + 1)) / 2.0**count


@each("count", [5, 6, 9, 20, 45, 101])
def test_the_interval_is_the_narrowest_that_covers_90_percent(count):
    ratio, (low, high) = paired_ratio([float(i) for i in range(1, count + 1)], [1.0] * count)
    assert ratio == (count + 1) / 2
    first, last = int(low) - 1, int(high) - 1
    assert first + last == count - 1
    assert coverage(count, first, last) >= 0.9 > coverage(count, first + 1, last - 1)


def test_few_pairs_give_their_range():
    assert paired_ratio([2.0], [1.0]) == (2.0, (2.0, 2.0))
    assert paired_ratio([2.0, 6.0], [1.0, 2.0]) == (2.5, (2.0, 3.0))


def test_the_difference_is_that_of_the_last_fifth():
    reference = [9.0] * 8 + [1.0, 3.0]
    assert tail_difference([5.0] * 8 + [2.0, 2.02], reference) == pytest.approx(0.005)
    assert tail_difference([1.0], [2.0]) == 0.5
    assert tail_difference([0.0], [0.0]) == 0.0 and tail_difference([1.0], [0.0]) is None
    assert tail_difference([nan], [1.0]) is None and tail_difference([1.0], [inf]) is None


def test_steps_without_a_difference_have_no_point():
    found = relative_differences([1.0, 2.0, nan, 1.0, -3.0], [1.0, 4.0, 1.0, 0.0, -2.0])
    assert found == [None, 0.5, None, None, 0.5]
