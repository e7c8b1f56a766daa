"""How many elements of a tensor lie in each binade; on an accelerator without waiting for it."""

import torch

from mp_agent.probe import accelerator
from mp_agent.records.columns import TENSOR_EXPONENTS

_BINS = len(TENSOR_EXPONENTS)
_LANES = 64
"""Copies of the bins on a device: threads that add to one number wait for each other."""
_MANTISSA_BITS = 52
_BIAS = 1023
_LOWEST, _HIGHEST = TENSOR_EXPONENTS[0] + _BIAS, TENSOR_EXPONENTS[-1] + _BIAS


def magnitudes_in_bins(magnitudes_N: torch.Tensor) -> torch.Tensor:
    """Return float64 [B], the number of elements in each bin of `TENSOR_EXPONENTS`.

    magnitudes_N: float64 and finite, at least 0. Counts are exact; zeros are in no bin.
    """
    bits_N = magnitudes_N.contiguous().view(torch.int64)
    places_N = (bits_N >> _MANTISSA_BITS).clamp_(_LOWEST, _HIGHEST).sub_(_LOWEST)
    if accelerator.is_on_host(magnitudes_N.device):
        counts_B = torch.zeros(_BINS, dtype=torch.float64)
        counts_B.scatter_add_(0, places_N, torch.ones_like(magnitudes_N))
    else:
        counts_B = counted_in_lanes(places_N)
    counts_B[0] -= (magnitudes_N == 0.0).sum()
    return counts_B


def counted_in_lanes(places_N: torch.Tensor) -> torch.Tensor:
    """Return float64 [B], how often each bin occurs among places, on their device."""
    lanes_N = torch.arange(places_N.numel(), device=places_N.device) % _LANES
    counts = torch.zeros(_LANES * _BINS, dtype=torch.float64, device=places_N.device)
    ones_N = torch.ones_like(places_N, dtype=torch.float64)
    # Unlike scatter_add_, it also runs where algorithms are to be deterministic.
    counts.index_add_(0, places_N + lanes_N * _BINS, ones_N)
    return counts.view(_LANES, _BINS).sum(0)
