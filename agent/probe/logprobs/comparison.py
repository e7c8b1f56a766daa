"""A row of statistics of how two engines' log-probabilities differ; without waiting for a device.

Δ is the trainer's log-probability less the sampler's, and exp(Δ) the weight with which a token of
the sampler's counts for the trainer (J. Schulman, Approximating KL Divergence, 2020, with q the
sampler and p the trainer).
"""

from math import nan

import numpy as np
import torch

from mp_agent.probe.accelerator import DeviceConstants, on_one_device
from mp_agent.records.columns import DELTA_EDGES, LOGPROBS

MAGNITUDE_AT_MOST = 1e100
"""Of what counts as finite: no sum of squares then overflows."""
DELTA_AT_MOST = 300.0
"""Of an exponent: sums of exp(Δ) and of its squares stay within float64."""

_PIECE_TOKENS_HOST = 2**15
_PIECE_TOKENS_DEVICE = 2**22
_EDGES = np.array(DELTA_EDGES).view(np.int64)
_BINS = len(DELTA_EDGES) + 1


class LogprobComparison:
    """Compares log-probabilities, and adds rows up."""

    def __init__(self) -> None:
        self._constants = DeviceConstants()

    def row(
        self, trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the columns [C] of `LOGPROBS` as float64 on the device of the arguments.

        trainer, sampler: log-probabilities of the same tokens, floating point, of the same shape
        (any, also empty) on the same device. mask: of that shape; tokens count where it is not 0.
        Sums are over float64; tokens of which a log-probability is not finite are left out and
        counted.
        """
        limit = _PIECE_TOKENS_HOST if trainer.device.type == "cpu" else _PIECE_TOKENS_DEVICE
        trainer_N, sampler_N = trainer.detach().reshape(-1), sampler.detach().reshape(-1)
        mask_N = None if mask is None else mask.detach().reshape(-1)
        row_C = _empty_row(trainer.device)
        for begin in range(0, trainer_N.numel(), limit):
            part = slice(begin, begin + limit)
            counted_N = None if mask_N is None else mask_N[part] != 0
            row_C = joined(row_C, self._piece(trainer_N[part], sampler_N[part], counted_N))
        return row_C

    def _piece(
        self,
        trainer_N: torch.Tensor,
        sampler_N: torch.Tensor,
        counted_N: torch.Tensor | None,
    ) -> torch.Tensor:
        trainer_N, sampler_N = trainer_N.double(), sampler_N.double()
        finite_N = (trainer_N.abs() <= MAGNITUDE_AT_MOST) & (sampler_N.abs() <= MAGNITUDE_AT_MOST)
        if counted_N is None:
            counted_N = torch.ones_like(finite_N)
        there_N = counted_N & finite_N
        trainer_N = trainer_N.where(there_N, 0.0)
        delta_N = trainer_N - sampler_N.where(there_N, 0.0)
        exponent_N = delta_N.clamp(-DELTA_AT_MOST, DELTA_AT_MOST)
        weight_N = exponent_N.exp().where(there_N, 0.0)
        # A Δ that is cut off on the right is so in both terms; rounding must not make it negative.
        k3_N = (exponent_N.expm1() - delta_N.clamp(max=DELTA_AT_MOST)).clamp(min=0.0)
        magnitude_N = delta_N.abs()
        tokens = _count(there_N)
        sums = [
            tokens,
            _count(counted_N & ~finite_N),
            torch.zeros_like(tokens),
            _count(delta_N > DELTA_AT_MOST),
            delta_N.sum(),
            delta_N.square().sum(),
            k3_N.sum(),
            weight_N.sum(),
            weight_N.square().sum(),
            trainer_N.sum(),
            trainer_N.square().sum(),
            (trainer_N * delta_N).sum(),
        ]
        largest = magnitude_N.amax().masked_fill(tokens == 0, nan)
        return torch.cat((torch.stack(sums), self._bins(magnitude_N, there_N), largest.reshape(1)))

    def _bins(self, magnitude_N: torch.Tensor, there_N: torch.Tensor) -> torch.Tensor:
        """Return how many tokens are in each bin [B]; counts are exact."""
        edges = self._constants.on(magnitude_N.device, _EDGES).view(torch.float64)
        places_N = torch.bucketize(magnitude_N, edges)
        bins_B = torch.zeros(_BINS, dtype=torch.float64, device=magnitude_N.device)
        return bins_B.index_add_(0, places_N, there_N.double())


def refused_row() -> torch.Tensor:
    """Return the row [C] of one call that could not be compared, on the host."""
    row_C = _empty_row(torch.device("cpu"))
    row_C[LOGPROBS.names.index("refused_calls")] = 1.0
    return row_C


def joined(one_C: torch.Tensor, other_C: torch.Tensor) -> torch.Tensor:
    """Return two rows as one, on the device if either is there: sums, and the larger maximum."""
    one_C, other_C = on_one_device((one_C, other_C))
    return torch.cat((one_C[:-1] + other_C[:-1], torch.fmax(one_C[-1:], other_C[-1:])))


def _empty_row(device: torch.device) -> torch.Tensor:
    row_C = torch.zeros(len(LOGPROBS.names), dtype=torch.float64, device=device)
    row_C[-1:].fill_(nan)
    return row_C


def _count(mask_N: torch.Tensor) -> torch.Tensor:
    return mask_N.sum(dtype=torch.float64)
