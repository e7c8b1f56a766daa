"""Tables of the gradients' distribution, compared with the reference, and numbers for them."""

from collections.abc import Sequence
from itertools import product
from math import fsum, isfinite

import numpy as np
import torch

from mp_agent.probe.statistics.distribution import (
    INFINITE_FROM,
    NEAR_OVERFLOW,
    SUBNORMAL_BELOW,
    ZERO_UP_TO,
)
from mp_agent.records.columns import DISTRIBUTION, EXPONENTS
from tests.agent.distribution_reference import distribution_reference
from tests.agent.probe.statistics.reference import as_float64

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}

Gradients = Sequence[torch.Tensor | None]


def assert_distribution(
    table: torch.Tensor,
    gradients: Gradients,
    inverse_scale: float = 1.0,
    loss_scale: float | None = None,
    *,
    sums: float = 1e-6,
) -> None:
    """Compare a table [L, C] with the reference: counts equal, sums nearly, none of it infinite.

    sums: the tolerance, of the sum of squares, and of the sum of magnitudes.
    """
    assert table.dtype is torch.float64
    assert tuple(table.shape) == (len(gradients), len(DISTRIBUTION.names))
    assert not torch.isinf(table).any()
    for row, gradient in zip(table.tolist(), gradients, strict=True):
        values = np.zeros(0) if gradient is None else as_float64(gradient)
        with np.errstate(all="ignore"):
            unscaled = (values * inverse_scale).tolist()
        expected = distribution_reference(unscaled, loss_scale)
        scale_of_sum = fsum(abs(value) for value in unscaled if isfinite(value))
        tolerances = {"sum": sums * scale_of_sum, "sum_squares": sums * expected["sum_squares"]}
        for name, found in zip(DISTRIBUTION.names, row, strict=True):
            tolerance = tolerances.get(name, 0.0)
            np.testing.assert_allclose(found, expected[name], 0.0, tolerance, err_msg=name)


def around_every_edge(
    dtype: torch.dtype, inverse_scale: float, loss_scale: float | None
) -> torch.Tensor:
    """Return what is about where a count begins or ends, and its neighbours in the format."""
    edges = [2.0**exponent / inverse_scale for exponent in EXPONENTS]
    if loss_scale is not None:
        marks = (ZERO_UP_TO, SUBNORMAL_BELOW, NEAR_OVERFLOW, INFINITE_FROM)
        scales = product((0.5, 1.0, 2.0), marks)
        edges += [mark / factor / loss_scale / inverse_scale for factor, mark in scales]
    info = torch.finfo(dtype)
    bounded = torch.tensor(edges, dtype=torch.float64).clamp(-info.max, info.max).to(dtype)
    bits = bounded.view(_INTEGERS[dtype.itemsize])
    return torch.cat([(bits + offset).view(dtype) for offset in range(-2, 3)])
