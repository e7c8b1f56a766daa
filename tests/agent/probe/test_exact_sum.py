"""Exact sums by parts, against `math.fsum`."""

import random
import sys
from math import fsum, inf

import numpy as np

from mp_agent.probe.packing import parts_of, value_of
from tests.subtests import each

EDGES = [0.0, -0.0, 5e-324, -5e-324, 2.2e-308, 1.0, 0.1, sys.float_info.max, -1e300]


@each("value", EDGES)
def test_a_value_comes_back(value):
    assert value_of(parts_of(value)) == value


@each("seed", range(20))
def test_sums_are_rounded_once_whatever_the_order(seed):
    generator = random.Random(seed)
    values = [
        generator.uniform(-1.0, 1.0) * 2.0 ** generator.randint(-1070, 900) for _ in range(50)
    ] + EDGES[:-2]
    assert _sum(values) == fsum(values)
    generator.shuffle(values)
    assert _sum(values) == fsum(values)


def _sum(values: list[float]) -> float:
    return value_of(np.sum([parts_of(value) for value in values], axis=0))


def test_a_sum_beyond_float64_is_infinite():
    large = parts_of(sys.float_info.max)
    assert value_of(large + large) == inf
    assert value_of(-(large + large)) == -inf
    assert value_of(large + large - large) == sys.float_info.max
