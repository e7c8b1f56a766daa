"""Tables of statistics, compared with the reference."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENTS
from tests.agent.gradient_reference import TOLERANCES, reference_columns


def expected_row(gradients: Sequence[torch.Tensor], inverse_scale: float = 1.0) -> dict[str, float]:
    """Return the columns of some gradients by name."""
    elements = np.concatenate([np.zeros(0), *(as_float64(gradient) for gradient in gradients)])
    return reference_columns(elements, inverse_scale)


def by_name(row: torch.Tensor) -> dict[str, float]:
    """Return a row of a table by column name."""
    return dict(zip(GRADIENT_COLUMN_NAMES, row.tolist(), strict=True))


def assert_rows(table: torch.Tensor, expected: Sequence[Mapping[str, float]]) -> None:
    """Compare a table with expected rows, each column to its tolerance; none is infinite."""
    assert table.dtype is torch.float64
    assert tuple(table.shape) == (len(expected), len(GRADIENT_COLUMN_NAMES))
    assert not torch.isinf(table).any()
    for row, wanted in zip(table, expected, strict=True):
        for name, value in by_name(row).items():
            tolerance = TOLERANCES.get(name, 0.0)
            np.testing.assert_allclose(value, wanted[name], tolerance, 0.0, err_msg=name)


def assert_totals(table: torch.Tensor, expected: Sequence[Mapping[str, float]]) -> None:
    """Compare a table of totals with expected rows, of which it has what is not of layers alone."""
    assert_rows(table, [totals_of(row) for row in expected])


def totals_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return the columns of some gradients as totals have them."""
    return {**row, **dict.fromkeys(GRADIENT_COLUMN_NAMES[GRADIENTS.totals :], np.nan)}


def as_float64(gradient: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return the elements that a gradient stores, in a row."""
    gradient = gradient.detach().cpu()
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.stack((gradient.real, gradient.imag))
    return gradient.to(torch.float64).contiguous().numpy().ravel()
