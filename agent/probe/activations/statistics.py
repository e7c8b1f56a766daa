"""A row of statistics of one tensor; on an accelerator without waiting for it."""

from math import isfinite, nan
from sys import float_info

import torch

from mp_agent.probe.statistics.folding import bounded, folded
from mp_agent.probe.statistics.pieces import pieces, stored_values
from mp_agent.records.columns import ACTIVATIONS

_HOST_CHUNK_ELEMENTS = 64 * 1024
"""As float64 they fit the processor's cache."""
_DEVICE_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Bounds the scratch on a device: each chunk is widened to float64."""


def measurable(tensor: torch.Tensor) -> bool:
    """Return whether there is anything to measure in a tensor."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return numbers and tensor.layout is torch.strided and tensor.numel() > 0


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim bool, on the device of `values`: whether no element is NaN or Inf.

    values: as for `output_row`. On a device nothing waits.
    """
    extremes = [
        bound
        for piece in pieces(stored_values(values), _DEVICE_CHUNK_ELEMENTS)
        for bound in torch.aminmax(piece)  # in one pass, and NaN if there is any
    ]
    return torch.stack(extremes).isfinite().all()


def output_row(output: torch.Tensor, call: int, near_overflow: float) -> torch.Tensor:
    """Return float64 [C], the columns of `ACTIVATIONS`, on the device of `output`.

    The last two, which are of the backward pass, are absent.

    output: not empty, of any shape, strided, floating point or complex (real and imaginary parts
    count separately). call: which call of a module in this step returned it. near_overflow: the
    magnitude above which elements of FP16 outputs are counted. Sums are over float64.
    """
    values = stored_values(output)
    limit = near_overflow if output.dtype is torch.float16 else float("inf")
    if values.device.type == "cpu":
        tally = _Tally(limit)
        for piece in pieces(values, _HOST_CHUNK_ELEMENTS):
            tally.add(piece)
        return torch.tensor(tally.row(call), dtype=torch.float64, device="cpu")
    rows = [_row_on_device(piece, call, limit) for piece in pieces(values, _DEVICE_CHUNK_ELEMENTS)]
    return folded(ACTIVATIONS, rows)


class _Tally:
    """Running statistics of a tensor on the host."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._elements = 0
        self._sum = 0.0
        self._sum_squares = 0.0
        self._abs_max = nan
        self._zeros = 0
        self._nans = 0
        self._infinities = 0
        self._near_overflow = 0

    def add(self, piece: torch.Tensor) -> None:
        """Add a piece; where its sum is not finite, so may be elements of it."""
        self._elements += piece.numel()
        values = piece.double().reshape(-1)
        self._zeros += piece.numel() - int(values.count_nonzero())
        total = float(values.sum())
        if not isfinite(total):
            nans = int(values.isnan().sum())
            finite = values[values.isfinite()]
            self._nans += nans
            self._infinities += values.numel() - finite.numel() - nans
            values, total = finite, float(finite.sum())
        if values.numel():
            self._add_finite(values, total)

    def _add_finite(self, values: torch.Tensor, total: float) -> None:
        low, high = (float(bound) for bound in torch.aminmax(values))
        largest = max(-low, high)
        self._abs_max = largest if self._abs_max != self._abs_max else max(self._abs_max, largest)
        self._sum = bounded(self._sum + total)
        self._sum_squares = bounded(self._sum_squares + float(values.dot(values)))
        if largest > self._limit:
            self._near_overflow += int((values.abs() > self._limit).sum())

    def row(self, call: int) -> list[float]:
        """Return the columns of `ACTIVATIONS`."""
        return [
            float(self._elements),
            self._sum,
            self._sum_squares,
            self._abs_max,
            float(self._zeros),
            float(self._nans),
            float(self._infinities),
            float(self._near_overflow),
            float(call) if self._nans or self._infinities else nan,
            nan,  # known after backward
            nan,
        ]


def _row_on_device(piece: torch.Tensor, call: int, limit: float) -> torch.Tensor:
    values = piece.double().reshape(-1)
    finite = values.isfinite()
    nans, finites = values.isnan().sum(), finite.sum()
    zeros = (values == 0.0).sum()
    values = values.masked_fill(~finite, 0.0)
    magnitudes = values.abs()
    elements = torch.full_like(finites, values.numel())
    nonfinite = finites != elements
    bound = float_info.max
    return torch.stack(
        [
            elements.double(),
            values.sum().clamp(-bound, bound),
            (values * values).sum().clamp(max=bound),
            magnitudes.amax().masked_fill(finites == 0, nan),
            zeros.double(),
            nans.double(),
            (elements - finites - nans).double(),
            (magnitudes > limit).sum().double(),
            torch.full_like(values[0], float(call)).masked_fill(~nonfinite, nan),
            torch.full_like(values[0], nan),  # known after backward
            torch.full_like(values[0], nan),
        ]
    )
