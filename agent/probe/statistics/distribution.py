"""How the elements of one layer's gradient are distributed, and what FP16 would lose of them.

Stock operations in pieces of bounded size, without waiting for a device; on sampled steps only.
Kernels for it are in `fused/distribution_kernels`. They count magnitudes at or beyond each of some
boundaries: every count of `DISTRIBUTION` is a difference of two such counts. A magnitude grows with
its bits, so a boundary is, for given scales, one float32 in whose place `find_edges` puts its bits.
"""

from collections.abc import Sequence
from math import inf, nan, nextafter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.probe.statistics.pieces import bounded_tensor, pieces, stored_values
from mp_agent.records.columns import DISTRIBUTION, EXPONENTS, exponent_column

_PIECE_ELEMENTS_HOST = 2**15
_PIECE_ELEMENTS_DEVICE = 2**22

ZERO_UP_TO = 2.0**-25
"""Half of FP16's smallest number rounds to zero (to even), all above to the smallest number."""
SUBNORMAL_BELOW = 2.0**-14 - 2.0**-25
"""From here on FP16 rounds to its smallest normal number."""
NEAR_OVERFLOW = 60000.0
INFINITE_FROM = 65520.0
"""From here on FP16 rounds to Inf."""
OF_FP16 = (
    "fp16_elements",
    "flushed_elements",
    "flushed_at_half_elements",
    "flushed_at_double_elements",
    "subnormal_elements",
    "near_overflow_elements",
    "overflow_at_double_elements",
)
"""Columns that there are none of without a loss scale."""
_WIDTH = EXPONENTS[1] - EXPONENTS[0]
_LOWEST, _HIGHEST = float(EXPONENTS[0]), float(EXPONENTS[-1] + _WIDTH)


@torch.no_grad()
def distribution_rows(
    gradients: Sequence[torch.Tensor | None],
    inverse_scale: float | torch.Tensor,
    loss_scale: float | torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Return float64 [L, C] on `device`, a row of `distribution_row` per gradient."""
    if not gradients:
        return torch.empty((0, len(DISTRIBUTION.names)), dtype=torch.float64, device=device)
    return torch.stack(
        [distribution_row(gradient, inverse_scale, loss_scale, device) for gradient in gradients]
    )


def distribution_row(
    gradient: torch.Tensor | None,
    inverse_scale: float | torch.Tensor,
    loss_scale: float | torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Return the columns [C] of `DISTRIBUTION` for one layer, as float64 on `device`.

    inverse_scale: 1 / the factor by which the gradient is still multiplied. loss_scale: that of
    the step, whether or not the gradient is still multiplied by it; None where there is none, and
    one that is not finite is none. Elements are looked at unscaled: those that are not finite then
    count as such. Counts are exact; NaN where a column was not observed. No gradient is no element.
    """
    inverse = _on(device, inverse_scale)
    scale = None if loss_scale is None else _on(device, loss_scale)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    total = {name: zero for name in DISTRIBUTION.names}
    if gradient is not None:
        limit = _PIECE_ELEMENTS_HOST if device.type == "cpu" else _PIECE_ELEMENTS_DEVICE
        for piece in pieces(stored_values(gradient), limit):
            for name, value in _sums(piece.reshape(-1), inverse, scale).items():
                total[name] = total[name] + value
    absent = zero + nan if scale is None else scale - scale
    total |= {name: total[name] + absent for name in OF_FP16}
    row_C = torch.stack([total[name] for name in DISTRIBUTION.names])
    largest = torch.finfo(torch.float64).max
    return bounded_tensor(row_C).clamp(min=-largest)


def _sums(
    values_N: torch.Tensor, inverse: torch.Tensor, scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return what one piece adds to the columns."""
    values_N = values_N.double() * inverse
    finite_N = values_N.isfinite()
    values_N = values_N.where(finite_N, 0.0)
    magnitudes_N = values_N.abs()
    nonzero_N = magnitudes_N > 0.0
    nonzero = _count(nonzero_N)
    sums = {
        "elements": torch.full_like(inverse, float(values_N.numel())),
        "nonfinite_elements": _count(~finite_N),
        "sum": values_N.sum(),
        "sum_squares": values_N.square().sum(),
        "nonzero_elements": nonzero,
    }
    # The exponent of zero is NaN, which falls into no bin.
    exponents_N = torch.frexp(magnitudes_N)[1].double() - 1.0
    exponents_N = exponents_N.clamp(_LOWEST, _HIGHEST - 1.0).where(nonzero_N, nan)
    for exponent in EXPONENTS:
        inside_N = (exponents_N >= exponent) & (exponents_N < exponent + _WIDTH)
        sums[exponent_column(exponent)] = _count(inside_N)
    if scale is not None:
        sums |= _in_fp16(magnitudes_N * scale, nonzero_N, nonzero)
    return sums


def _in_fp16(
    scaled_N: torch.Tensor, nonzero_N: torch.Tensor, nonzero: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return what becomes of scaled magnitudes in FP16."""
    flushed_N = nonzero_N & (scaled_N <= ZERO_UP_TO)
    return {
        "fp16_elements": nonzero,
        "flushed_elements": _count(flushed_N),
        "flushed_at_half_elements": _count(nonzero_N & (scaled_N <= 2.0 * ZERO_UP_TO)),
        "flushed_at_double_elements": _count(nonzero_N & (scaled_N <= 0.5 * ZERO_UP_TO)),
        "subnormal_elements": _count(nonzero_N & ~flushed_N & (scaled_N < SUBNORMAL_BELOW)),
        "near_overflow_elements": _count(scaled_N > NEAR_OVERFLOW),
        "overflow_at_double_elements": _count(scaled_N >= 0.5 * INFINITE_FROM),
    }


def _count(mask_N: torch.Tensor) -> torch.Tensor:
    return mask_N.sum(dtype=torch.float64)


def _on(device: torch.device, value: float | torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.float64, non_blocking=True).reshape(())
    return torch.full((), value, dtype=torch.float64, device=device)


class Boundary(NamedTuple):
    """A magnitude is at or beyond it from `least` on."""

    least: float
    loss_scaled: bool = False
    """Whether it is the unscaled magnitude times the loss scale of the step that is compared."""


def _above(value: float) -> float:
    return nextafter(value, inf)


_BOUNDARIES = {
    "all": Boundary(0.0),
    "nonzero": Boundary(_above(0.0)),
    **{exponent_column(exponent): Boundary(2.0**exponent) for exponent in EXPONENTS[1:]},
    "nonfinite": Boundary(inf),
    "not_flushed": Boundary(_above(ZERO_UP_TO), loss_scaled=True),
    "not_flushed_at_half": Boundary(_above(2.0 * ZERO_UP_TO), loss_scaled=True),
    "not_flushed_at_double": Boundary(_above(0.5 * ZERO_UP_TO), loss_scaled=True),
    "normal": Boundary(SUBNORMAL_BELOW, loss_scaled=True),
    "near_overflow": Boundary(_above(NEAR_OVERFLOW), loss_scaled=True),
    "overflow_at_double": Boundary(0.5 * INFINITE_FROM, loss_scaled=True),
}
BOUNDARIES = len(_BOUNDARIES)
NONFINITE = list(_BOUNDARIES).index("nonfinite")
"""Beyond it are the elements whose unscaled magnitudes are not finite: beyond all others too."""

_STARTS_OF_BINS = ("nonzero", *map(exponent_column, EXPONENTS[1:]), "nonfinite")

_FROM_AND_BELOW = {
    "elements": ("all", None),
    "nonfinite_elements": ("nonfinite", None),
    "nonzero_elements": ("nonzero", "nonfinite"),
    "fp16_elements": ("nonzero", "nonfinite"),
    "flushed_elements": ("nonzero", "not_flushed"),
    "flushed_at_half_elements": ("nonzero", "not_flushed_at_half"),
    "flushed_at_double_elements": ("nonzero", "not_flushed_at_double"),
    "subnormal_elements": ("not_flushed", "normal"),
    "near_overflow_elements": ("near_overflow", "nonfinite"),
    "overflow_at_double_elements": ("overflow_at_double", "nonfinite"),
    **{
        exponent_column(exponent): (_STARTS_OF_BINS[number], _STARTS_OF_BINS[number + 1])
        for number, exponent in enumerate(EXPONENTS)
    },
}

COLUMNS = ("sum", "sum_squares", *_FROM_AND_BELOW)
"""What the kernels write; all columns of `DISTRIBUTION` have to be among them."""

SPAN_FIELDS = 3
"""int32 of a column, see `span_table`."""

SUMS = 2
"""float64 of a chunk: sum, sum of squares."""


def boundary_table() -> npt.NDArray[np.float64]:
    """Return [boundaries, 2]: the least number at or beyond it, 1 where that is loss-scaled."""
    return np.array(list(_BOUNDARIES.values()), dtype=np.float64)


def span_table() -> npt.NDArray[np.int32]:
    """Return [columns, SPAN_FIELDS], in the order of `DISTRIBUTION`.

    Numbers of the boundaries from which on, and below which, a column counts, -1 for none (both
    for no count); 1 where there is no value without a loss scale.
    """
    numbers = {name: number for number, name in enumerate(_BOUNDARIES)}
    spans = [_FROM_AND_BELOW.get(name, (None, None)) for name in DISTRIBUTION.names]
    return np.array(
        [
            (*(-1 if each is None else numbers[each] for each in span), name in OF_FP16)
            for name, span in zip(DISTRIBUTION.names, spans, strict=True)
        ],
        dtype=np.int32,
    )
