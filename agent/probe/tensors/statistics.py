"""A row of statistics of one watched tensor; on an accelerator without waiting for it."""

from collections.abc import Iterator
from math import inf, nan
from sys import float_info

import torch

from mp_agent.probe.statistics.folding import folded
from mp_agent.probe.statistics.pieces import pieces
from mp_agent.probe.tensors.magnitudes import magnitudes_in_bins
from mp_agent.probe.tensors.running_sum import RunningSum
from mp_agent.probe.tensors.slices import range_ratio
from mp_agent.records.columns import TENSORS

_HOST_CHUNK_ELEMENTS = 64 * 1024
"""As float64 they fit the processor's cache."""
_DEVICE_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Bounds the scratch on a device: each chunk is widened to float64."""


def tensor_row(tensor: torch.Tensor, *, dim: int | None, reduction: bool) -> torch.Tensor:
    """Return float64 [C], the columns of `TENSORS`, on the device of `tensor`.

    tensor: not empty, strided, of numbers or truth values; the real and imaginary parts of complex
    ones count separately, and are two sums. dim: from 0, the dimension whose slices are compared.
    reduction: whether the script sums the elements in this dtype.
    """
    host = tensor.device.type == "cpu"
    limit = _HOST_CHUNK_ELEMENTS if host else _DEVICE_CHUNK_ELEMENTS
    rows = []
    for values in _parts(tensor):
        rounded = values.is_floating_point() and _has_running_sum(values)
        running = RunningSum(values.dtype, values.device) if rounded else None
        rows += [_piece_row(piece, running, reduction=reduction) for piece in pieces(values, limit)]
    row = folded(TENSORS, rows)
    if dim is not None:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        row[TENSORS.names.index("range_ratio")] = range_ratio(values, dim, limit)
    return row


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.is_complex():
        yield from (tensor.real, tensor.imag)
    else:
        yield tensor


def _has_running_sum(values: torch.Tensor) -> bool:
    """Return whether torch may compute one: not on CUDA where it is to be deterministic."""
    return values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled()


def _piece_row(piece: torch.Tensor, running: RunningSum | None, *, reduction: bool) -> torch.Tensor:
    values_N = piece.double().reshape(-1)
    finite_N = values_N.isfinite()
    finites = finite_N.sum()
    values_N = values_N.masked_fill(~finite_N, 0.0)
    magnitudes_N = values_N.abs()
    absent = torch.full_like(values_N[0], nan)
    smallest = magnitudes_N.masked_fill(magnitudes_N == 0.0, inf).amin()
    swallowed = absent if running is None else running.lost(values_N)
    columns = {
        "elements": torch.full_like(absent, values_N.numel()),
        "nonfinite_elements": (values_N.numel() - finites).double(),
        "sum": _bounded(values_N.sum()),
        "sum_squares": _bounded((values_N * values_N).sum()),
        "abs_sum": _bounded(magnitudes_N.sum()),
        "abs_max": magnitudes_N.amax().masked_fill(finites == 0, nan),
        "abs_min": smallest.masked_fill(smallest == inf, nan),
        "swallowed_sum": _bounded(swallowed),
        "reduction": torch.full_like(absent, float(reduction)),
        "range_ratio": absent,
    }
    single = TENSORS.names[: len(columns)]
    return torch.cat(
        (torch.stack([columns[name] for name in single]), magnitudes_in_bins(magnitudes_N))
    )


def _bounded(total: torch.Tensor) -> torch.Tensor:
    """Return a sum of finite numbers, at most float64's largest magnitude."""
    return total.clamp(-float_info.max, float_info.max)
