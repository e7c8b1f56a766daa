"""Epsilon and clip norm, from gradients whose right answer is known."""

import numpy as np
import pytest
import torch

from mp_agent.plan.recommendation.choose import adam_epsilon, clip_norm, rounded_up
from mp_agent.plan.recommendation.steps import count_exponents


def test_ordinary_gradients_keep_the_default_epsilon():
    epsilon, reason = adam_epsilon(count_exponents(torch.full((100,), 1e-4)))
    assert epsilon == 1e-8 and "torch's default" in reason
    assert adam_epsilon(count_exponents(torch.full((100,), 5e-8)))[0] == 1e-8
    assert adam_epsilon(count_exponents(torch.zeros(4)))[0] == 1e-8


@pytest.mark.parametrize("size", [5e-9, 1e-10, 1e-12])
def test_tiny_gradients_get_an_epsilon_below_a_tenth_of_them(size):
    epsilon, _ = adam_epsilon(count_exponents(torch.full((100,), size)))
    assert size / 400 < epsilon <= size / 10
    step = size / (np.sqrt(size**2) + epsilon)
    assert step > 0.9 > size / (size + 1e-6)


def test_the_smallest_gradients_stop_at_the_smallest_epsilon():
    assert adam_epsilon(count_exponents(torch.full((4,), 1e-30)))[0] == 1e-15


def test_the_clip_norm_is_the_largest_norm_and_the_median_for_stability():
    norms = (1.0, 1.234, 5.01)
    assert clip_norm(norms, "speed")[0] == 5.1
    assert clip_norm(norms, "stability")[0] == 1.3
    assert clip_norm((0.0, 0.0), "speed")[0] is None


@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, 1.0), (0.6311, 0.64), (99.1, 100.0), (12345.0, 13000.0)]
)
def test_numbers_are_rounded_up_to_two_digits(value, expected):
    assert rounded_up(value) == pytest.approx(expected)
