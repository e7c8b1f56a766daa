"""Gradients of any layout as pieces of bounded size, without copying them."""

from collections.abc import Iterator

import torch


def stored_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the real numbers that a gradient stores, as a strided tensor of any shape."""
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient
        gradient = gradient.values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient


def pieces(values: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield views that cover `values` once, each of 1 to `limit` elements.

    Where memory has no gaps they are one-dimensional and contiguous, in memory order; else they
    keep the shape of the part that they cover.
    """
    count = values.numel()
    if count == 0:
        return
    flat = _flat_view(values)
    if flat is not None:
        yield from torch.split(flat, limit) if count > limit else (flat,)
    elif count <= limit:
        yield values
    else:
        rows = max(1, limit * values.shape[0] // count)
        for part in torch.split(values, rows) if values.shape[0] > 1 else (values[0],):
            yield from pieces(part, limit)


def _flat_view(values: torch.Tensor) -> torch.Tensor | None:
    """Return all elements as one contiguous dimension, or None where memory has gaps or overlap."""
    if values.is_contiguous():
        return values.view(-1)
    expected_stride = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1:
            if stride != expected_stride:
                return None
            expected_stride *= size
    return values.as_strided((values.numel(),), (1,))
