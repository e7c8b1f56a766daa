"""Which few of many indices are looked at, by slices alone: an index tensor would be a transfer."""

from collections.abc import Sequence

import torch


def spread(counts: Sequence[int], at_most: Sequence[int], offset: int) -> tuple[slice, ...]:
    """Return, of each of some dimensions, at most so many of its indices, evenly spread.

    Over the offsets from 0, each combination of indices is among them sooner or later; the first
    dimensions change fastest.
    """
    picked = []
    for count, limit in zip(counts, at_most, strict=True):
        step = max(1, -(-count // limit))
        offset, start = divmod(offset, step)
        picked.append(slice(start, None, step))
    return tuple(picked)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in at least 32 bits."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def lowest_visible(dtype: torch.dtype) -> float:
    """Return the number up to which a logit or a bias means that its key is masked.

    Masks are made of -Inf, or of the lowest number of their format.
    """
    return torch.finfo(dtype).min / 2 if dtype.is_floating_point else -torch.inf
