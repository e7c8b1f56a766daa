"""Counts the magnitudes of a tensor by exponent."""

import torch
from torch import Tensor

from mp_agent.advice.choose.exponents import ExponentCounts

_OFFSET = 1100
"""Added to exponents, so that none is negative; FP64 begins at -1074."""


def count_exponents(tensor: Tensor) -> ExponentCounts:
    """Return how many elements have which floor(log2) of their magnitude.

    Of a sparse tensor, the elements that it stores.
    """
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.abs().flatten()
    finite = values[values.isfinite()]
    nonzero = finite[finite > 0]
    if nonzero.dtype is not torch.float64:
        nonzero = nonzero.float()
    exponents = torch.frexp(nonzero).exponent.long() - 1
    found = torch.bincount(exponents + _OFFSET).tolist() if exponents.numel() else []
    return ExponentCounts(
        counts={index - _OFFSET: count for index, count in enumerate(found) if count},
        zeros=finite.numel() - nonzero.numel(),
        nonfinite=values.numel() - finite.numel(),
        abs_max=float(finite.max()) if finite.numel() else 0.0,
    )
