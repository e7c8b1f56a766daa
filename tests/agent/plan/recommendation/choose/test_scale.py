"""The initial loss scale, against FP16 itself."""

import torch

from mp_agent.plan.recommendation.choose import HEADROOM, LARGEST, initial_scale
from mp_agent.plan.recommendation.steps import count_exponents
from tests.subtests import each


@each("largest", [3e-9, 1e-4, 0.11, 1.0, 700.0, 40_000.0])
def test_the_largest_gradient_times_four_fits_and_twice_the_scale_would_not(largest):
    scale = initial_scale(count_exponents(torch.tensor([largest, largest / 1000])))
    assert torch.tensor(largest * HEADROOM * scale).half().isfinite()
    if 2.0**-14 < scale < LARGEST:
        assert not torch.tensor(2 * HEADROOM * largest * scale * 1.0005).half().isfinite()
    assert scale == 2.0 ** round(torch.log2(torch.tensor(scale)).item())


def test_without_gradients_the_scale_is_the_largest_one():
    assert initial_scale(count_exponents(torch.zeros(3))) == LARGEST


def test_gradients_beyond_every_scale_get_the_smallest_one():
    assert initial_scale(count_exponents(torch.tensor([6e12]))) == 2.0**-14
