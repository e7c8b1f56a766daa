"""Statistics of small tensors of one shape, a row each, in the passes that one chunk takes.

What `chunk` does for all elements of a chunk is done here per row. A row with zeros, or with a sum
or a smallest square that is not to be trusted, is left to `chunk`.
"""

from collections.abc import Iterator, Sequence
from sys import float_info

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.probe.statistics.digest import DIGEST_BITS
from mp_agent.probe.statistics.host.chunk import TRUSTED_SUM_MIN, Tally

PACK_ELEMENTS = 32 * 1024 - 1
"""Below 32 Ki elements torch does not split an operation: no waiting for other threads to wake."""

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}

Measured = tuple[int, Tally | None]
"""Which of the tensors, and its statistics; None where `chunk` has to measure it."""


class RowMeter:
    """Measures tensors of one dtype; holds the scratch for it."""

    def __init__(self, dtype: torch.dtype) -> None:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        with torch.inference_mode(False):  # else training outside it could not write to it
            self._pack = torch.empty(PACK_ELEMENTS, dtype=dtype, device="cpu")
            self._work = torch.empty(PACK_ELEMENTS, dtype=wide, device="cpu")
        self._work_bits = self._work.view(DIGEST_BITS[wide])
        self._number = _NUMPY[wide]
        self._normal_min = torch.finfo(wide).tiny

    def measure(
        self, tensors: Sequence[torch.Tensor], wanted: frozenset[str]
    ) -> Iterator[Measured]:
        """Yield the statistics of contiguous tensors of one shape, of 1 to `PACK_ELEMENTS`."""
        size = tensors[0].numel()
        rows = PACK_ELEMENTS // size
        for start in range(0, len(tensors), rows):
            batch = tensors[start : start + rows]
            sums, smallest, largest = self._reduced(batch, size)
            ordinary = (
                (smallest >= self._normal_min)
                & (sums >= TRUSTED_SUM_MIN)
                & (sums <= float_info.max)
            )
            peaks, floors = self._root(largest), self._root(smallest)
            rows_found = zip(
                ordinary.tolist(), sums.tolist(), peaks.tolist(), floors.tolist(), strict=True
            )
            for number, (usable, sum_squares, abs_max, abs_min) in enumerate(rows_found, start):
                yield (
                    number,
                    Tally(wanted, sum_squares, abs_max, 0, 0, 0, size, abs_min) if usable else None,
                )

    def _reduced(
        self, batch: Sequence[torch.Tensor], size: int
    ) -> tuple[npt.NDArray[np.floating], ...]:
        """Return the sum, the smallest and the largest of the squares of each tensor."""
        first, *others = batch[0].shape
        packed = self._pack[: len(batch) * size]
        torch.cat(tuple(batch), out=packed.view(len(batch) * first, *others))
        packed = packed.view(len(batch), size)
        squares = self._work[: len(batch) * size].view(len(batch), size)
        bits = self._work_bits[: len(batch) * size].view(len(batch), size)
        if self._pack.dtype is self._work.dtype:
            torch.mul(packed, packed, out=squares)
        else:
            squares.copy_(packed).square_()
        sums = squares.sum(dim=1).numpy().astype(np.float64)
        smallest = torch.amin(bits, dim=1).numpy().view(self._number)
        largest = torch.amax(bits, dim=1).numpy().view(self._number)
        return sums, smallest, largest

    def _root(self, squares: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Return the rounded roots; NaN and what lies beyond is not looked at."""
        with np.errstate(invalid="ignore", over="ignore"):
            return np.sqrt(squares.astype(np.float64)).astype(self._number)
