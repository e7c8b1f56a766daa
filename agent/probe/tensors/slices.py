"""How the ranges of a tensor's slices along one dimension differ; without waiting for a device."""

from collections.abc import Iterator
from math import inf, nan
from sys import float_info

import torch

from mp_agent.records.slice_ratio import SLICES_AT_MOST


def range_ratio(values: torch.Tensor, dim: int, limit: int) -> torch.Tensor:
    """Return float64 [], packed as in `records.slice_ratio`; NaN without two ranges above 0.

    values: not empty, strided, of any shape; at most `SLICES_AT_MOST` slices along `dim`, from 0.
    limit: elements that are widened to float64 at once. A slice's range is from its smallest to its
    largest finite element; at fault is the slice whose range is farther from the geometric mean of
    all.
    """
    slices = values.shape[dim]
    low_K = torch.full((slices,), inf, dtype=torch.float64, device=values.device)
    high_K = -low_K
    others = [other for other in range(values.dim()) if other != dim]
    for start, part in _parts(values, dim, limit):
        wide = part.double()
        wild = ~wide.isfinite()
        here = slice(start, start + part.shape[dim])
        lowest, highest = wide.masked_fill(wild, inf), wide.masked_fill(wild, -inf)
        if others:
            lowest, highest = lowest.amin(others), highest.amax(others)
        low_K[here] = torch.minimum(low_K[here], lowest)
        high_K[here] = torch.maximum(high_K[here], highest)
    return _packed_ratio((high_K - low_K).clamp(max=float_info.max))


def _packed_ratio(ranges_K: torch.Tensor) -> torch.Tensor:
    there_K = ranges_K > 0.0
    count = there_K.sum()
    high_K = ranges_K.masked_fill(~there_K, -inf)
    low_K = ranges_K.masked_fill(~there_K, inf)
    largest, smallest = high_K.amax(), low_K.amin()
    usual = ranges_K.log().masked_fill(~there_K, 0.0).sum() / count
    too_large = largest.log() - usual >= usual - smallest.log()
    index = torch.where(too_large, high_K.argmax(), low_K.argmin())
    ratio = (largest / smallest).clamp(max=float_info.max)
    bits = ratio.view(torch.int64) & ~(SLICES_AT_MOST - 1) | index
    return bits.view(torch.float64).masked_fill(count < 2, nan)


def _parts(
    values: torch.Tensor, dim: int, limit: int, start: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield views of at most `limit` elements that cover `values`, each with its first slice."""
    count = values.numel()
    if count <= limit:
        yield start, values
        return
    along = max(range(values.dim()), key=lambda other: (other != dim, values.shape[other]))
    if values.shape[along] == 1:
        along = dim
    rows = max(1, limit * values.shape[along] // count)
    for place, part in enumerate(torch.split(values, rows, dim=along)):
        yield from _parts(part, dim, limit, start + place * rows if along == dim else start)
