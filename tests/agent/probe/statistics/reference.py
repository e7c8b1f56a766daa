"""What the statistics ought to be, computed with numpy in float64 and exact summation."""

from collections.abc import Mapping, Sequence
from math import fsum, nan

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.records.columns import GRADIENT_COLUMN_NAMES

FLOAT64_MAX = np.finfo(np.float64).max
EXACT_SUM_ELEMENTS = 300_000
"""Beyond this numpy's pairwise float64 sum, good to 1e-15, stands in for `math.fsum`."""

TOLERANCES = {"sum_squares": 1e-6, "abs_max": 1e-15}
"""Relative ones; all other columns are counts, and exact."""


def expected_row(gradients: Sequence[torch.Tensor], inverse_scale: float = 1.0) -> dict[str, float]:
    """Return the columns of some gradients by name."""
    elements = np.concatenate([np.zeros(0), *(_as_float64(gradient) for gradient in gradients)])
    finite = elements[np.isfinite(elements)] * inverse_scale
    with np.errstate(over="ignore", under="ignore"):
        squares = np.square(finite)
    return {
        "sum_squares": min(_sum(squares), FLOAT64_MAX),
        "abs_max": float(np.abs(finite).max(initial=0.0)),
        "zero_elements": float(np.count_nonzero(elements == 0.0)),
        "nan_elements": float(np.count_nonzero(np.isnan(elements))),
        "inf_elements": float(np.count_nonzero(np.isinf(elements))),
        "elements": float(elements.size),
    }


def by_name(row: torch.Tensor) -> dict[str, float]:
    """Return a row of a table by column name."""
    return dict(zip(GRADIENT_COLUMN_NAMES, row.tolist(), strict=True))


def assert_rows(table: torch.Tensor, expected: Sequence[Mapping[str, float]]) -> None:
    """Compare a table with expected rows, each column to its tolerance; none is infinite."""
    assert table.dtype is torch.float64
    assert tuple(table.shape) == (len(expected), len(GRADIENT_COLUMN_NAMES))
    assert not torch.isinf(table).any()
    for row, wanted in zip(table, expected, strict=True):
        found = by_name(row)
        for name in GRADIENT_COLUMN_NAMES:
            np.testing.assert_allclose(
                found[name],
                wanted.get(name, nan),
                rtol=TOLERANCES.get(name, 0.0),
                atol=0.0,
                err_msg=name,
            )


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
