"""What the statistics ought to be, computed with numpy in float64 and exact summation."""

from collections.abc import Sequence
from math import fsum

import numpy as np
import numpy.typing as npt
import torch

FLOAT64_MAX = np.finfo(np.float64).max
EXACT_SUM_ELEMENTS = 300_000
"""Beyond this numpy's pairwise float64 sum, good to 1e-15, stands in for `math.fsum`."""


def expected_row(gradients: Sequence[torch.Tensor], inverse_scale: float = 1.0) -> list[float]:
    """Return sum of squares, largest magnitude, zeros, NaN, Inf and elements of some gradients."""
    elements = np.concatenate([np.zeros(0), *(_as_float64(gradient) for gradient in gradients)])
    finite = elements[np.isfinite(elements)] * inverse_scale
    with np.errstate(over="ignore", under="ignore"):
        squares = np.square(finite)
    return [
        min(_sum(squares), FLOAT64_MAX),
        float(np.abs(finite).max(initial=0.0)),
        float(np.count_nonzero(elements == 0.0)),
        float(np.count_nonzero(np.isnan(elements))),
        float(np.count_nonzero(np.isinf(elements))),
        float(elements.size),
    ]


def assert_rows(table: torch.Tensor, expected: Sequence[Sequence[float]]) -> None:
    """Compare a table with expected rows: counts exactly, magnitudes to 1e-6, all finite."""
    assert table.dtype is torch.float64
    assert tuple(table.shape) == (len(expected), 6)
    assert torch.isfinite(table).all()
    for row, wanted in zip(table.tolist(), expected, strict=True):
        np.testing.assert_allclose(row[0], wanted[0], rtol=1e-6, atol=0.0, err_msg="sum_squares")
        np.testing.assert_allclose(row[1], wanted[1], rtol=1e-15, atol=0.0, err_msg="abs_max")
        assert row[2:] == wanted[2:], "zero, nan, inf, elements"


def _as_float64(gradient: torch.Tensor) -> npt.NDArray[np.float64]:
    gradient = gradient.detach().cpu()
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.stack((gradient.real, gradient.imag))
    return gradient.to(torch.float64).contiguous().numpy().ravel()


def _sum(squares: npt.NDArray[np.float64]) -> float:
    if not np.isfinite(squares).all():
        return float(FLOAT64_MAX)
    return fsum(squares) if squares.size <= EXACT_SUM_ELEMENTS else float(squares.sum())
