"""Statistics of gradients in chunks that fit the processor's cache.

The ordinary chunk costs three passes, two of them in cache: square, smallest and largest square
(as integers, which is three times faster and orders squares alike), sum; of a layer two more, in
cache as well, which take the magnitudes and add them up. The largest square is the
rounded square of the largest magnitude, whose rounded root is that magnitude again, and so it is
with the smallest, unless that is zero or subnormal. A smallest square of zero shows that there may
be zeros: integers then give their number and the smallest magnitude among the others, those of 16
bits where the gradient has no more.
`torch.sum` adds pairwise; `torch.dot` does not, and is off by 1e-5 where all elements are equal. A
sum that is not a number of ordinary size shows NaN, Inf, or elements that squaring cannot
represent: such a chunk takes the careful path.

Statistics of small tensors of one shape, a row each, in the passes that one chunk takes.
What `chunk` does for all elements of a chunk is done here per row. A row with zeros, or with a sum
or a smallest square that is not to be trusted, is left to `chunk`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import frexp, inf, ldexp, nan, sqrt
from operator import attrgetter
from struct import pack, unpack
from sys import float_info

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.probe.statistics.pieces import DIGEST_BITS, INTEGERS, magnitudes, put_in_order
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES


@dataclass(slots=True)
class Tally:
    """Running statistics of still scaled gradients; its other fields are named as the columns."""

    wanted: frozenset[str] = frozenset(GRADIENT_COLUMN_NAMES)
    """The columns to measure."""
    sum_squares: float = 0.0
    abs_max: float = 0.0
    zero_elements: int = 0
    nan_elements: int = 0
    inf_elements: int = 0
    elements: int = 0
    abs_min: float = nan
    abs_sum: float = 0.0

    def note_smallest(self, magnitude: float) -> None:
        """Take in a magnitude; zero and what is not finite is none."""
        if 0.0 < magnitude < inf and not magnitude >= self.abs_min:
            self.abs_min = magnitude

    def values(self) -> tuple[float, ...]:
        """Return the statistics, in the order of `TALLY_COLUMNS`."""
        found: tuple[float, ...] = _VALUES(self)
        return found


TALLY_COLUMNS = tuple(field.name for field in fields(Tally) if field.name != "wanted")
_VALUES = attrgetter(*TALLY_COLUMNS)

CHUNK_ELEMENTS = 128 * 1024
"""Scratch and chunk take 1 MiB in FP32; fewer elements leave more time to the calls themselves."""
TRUSTED_SUM_MIN = 2.0**-80
"""Squares that vanish below the smallest float32 change a chunk's sum above this by under 2^-30."""

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_NO_BITS = 2**63 - 1

_FORMATS = {torch.float32: ("=i", "=f"), torch.float64: ("=q", "=d")}
"""`struct` formats of the bits and of the number."""


class ChunkMeter:
    """Adds chunks of up to `CHUNK_ELEMENTS` to tallies; holds the scratch for one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):  # else training outside it could not write to it
            self._copy = torch.empty(CHUNK_ELEMENTS, dtype=dtype, device="cpu")
            self._work = torch.empty(CHUNK_ELEMENTS, dtype=dtype, device="cpu")
        self._work_bits = self._work.view(_BITS[dtype])
        self._ordered = {bits: self._work.view(bits) for bits in (torch.int16, _BITS[dtype])}
        self._flags = np.empty(CHUNK_ELEMENTS, dtype=np.bool_)
        self._dtype, self._formats = dtype, _FORMATS[dtype]
        self._normal_bits = self._bits_of(torch.finfo(dtype).tiny)

    def add(self, chunks: Iterable[torch.Tensor], tally: Tally) -> None:
        """Add chunks of any floating dtype and layout, each of 1 to `CHUNK_ELEMENTS` elements."""
        largest, smallest = 0, _NO_BITS
        for chunk in chunks:
            count = chunk.numel()
            stored = chunk
            if chunk.dtype is not self._dtype or not chunk.is_contiguous():
                chunk = self._copy[:count].view(chunk.shape).copy_(chunk).view(-1)
                if not stored.is_contiguous() or INTEGERS.get(stored.dtype) is not torch.int16:
                    stored = chunk
            low, high = self._add_chunk(chunk, stored, tally)
            largest, smallest = max(largest, high), min(smallest, low)
        tally.abs_max = max(tally.abs_max, self._root(largest))
        if smallest != _NO_BITS:
            tally.note_smallest(self._root(smallest))

    def _add_chunk(
        self, chunk: torch.Tensor, stored: torch.Tensor, tally: Tally
    ) -> tuple[int, int]:
        """Add a contiguous chunk; return the bits of its smallest and its largest square.

        stored: the same numbers, in the gradient's own dtype if that is one of 16 bits. Returns
        `_NO_BITS` and 0 where the chunk's magnitudes are in the tally already.
        """
        squares, bits, count = self._work, self._work_bits, chunk.numel()
        if count != CHUNK_ELEMENTS:
            squares, bits = squares[:count], bits[:count]
        tally.elements += count
        torch.mul(chunk, chunk, out=squares)
        lowest, highest = torch.aminmax(bits)
        low, high = int(lowest.item()), int(highest.item())
        sum_squares = squares.sum().item() if high else 0.0
        # Below zero is NaN, whose sign torch keeps.
        zeros, smallest = self._look_below(stored, tally.wanted) if low <= 0 else (0, nan)
        if zeros < count and not TRUSTED_SUM_MIN <= sum_squares <= float_info.max:
            self._add_carefully(chunk, tally, zeros)
            return _NO_BITS, 0
        tally.zero_elements += zeros
        tally.sum_squares += sum_squares
        if "abs_sum" in tally.wanted and zeros < count:
            tally.abs_sum += torch.abs(chunk, out=squares).sum().item()
        if low >= self._normal_bits:
            return low, high
        if low > 0:
            self._note_smallest(chunk, tally)
        tally.note_smallest(smallest)
        return _NO_BITS, high

    def _look_below(self, stored: torch.Tensor, wanted: frozenset[str]) -> tuple[int, float]:
        """Return the number of zeros of either sign and the smallest other magnitude.

        Overwrites the scratch. NaN stands for a magnitude that is not there or not wanted. numpy
        compares into flags and counts them in half the time that torch needs.
        """
        count = stored.numel()
        ordered = put_in_order(stored, self._ordered[INTEGERS[stored.dtype]][:count])
        zero = torch.iinfo(ordered.dtype).max
        smallest = nan
        if "abs_min" in wanted:
            least = ordered.amin()
            if int(least.item()) == zero:
                return count, nan
            smallest = magnitudes(least, stored.dtype).item()
        flags = np.equal(ordered.numpy(), zero, out=self._flags[:count])
        return int(np.count_nonzero(flags)), smallest

    def _note_smallest(self, chunk: torch.Tensor, tally: Tally) -> None:
        """Take in the smallest magnitude of a chunk whose squares are too small to show it."""
        if "abs_min" in tally.wanted:
            ordered = put_in_order(chunk, self._work_bits[: chunk.numel()])
            tally.note_smallest(magnitudes(ordered.amin(), self._dtype).item())

    def _root(self, square_bits: int) -> float:
        """Return the rounded root, in the scratch's dtype, of the number with these bits."""
        integer, real = self._formats
        square = unpack(real, pack(integer, square_bits))[0]
        return float(unpack(real, pack(real, sqrt(square)))[0])

    def _bits_of(self, number: float) -> int:
        integer, real = self._formats
        return int(unpack(integer, pack(real, number))[0])

    def _add_carefully(self, chunk: torch.Tensor, tally: Tally, zeros: int) -> None:
        """Add a contiguous chunk that holds NaN, Inf, or elements too large or small to square."""
        work = self._work[: chunk.numel()]
        nans = int(torch.ne(chunk, chunk, out=work).sum().item())
        infinities = int(torch.abs(chunk, out=work).eq_(torch.inf).sum().item())
        tally.zero_elements += zeros
        tally.nan_elements += nans
        tally.inf_elements += infinities
        if zeros + nans + infinities == chunk.numel():
            return
        self._note_smallest(chunk, tally)
        absolute = torch.abs(chunk, out=work)
        if nans or infinities:
            absolute.nan_to_num_(nan=0.0, posinf=0.0)
        abs_max = absolute.max().item()
        tally.abs_max = max(tally.abs_max, abs_max)
        abs_sum, sum_squares = _scaled_sums(absolute, abs_max)
        tally.abs_sum += abs_sum
        tally.sum_squares += sum_squares


def _scaled_sums(magnitudes: torch.Tensor, abs_max: float) -> tuple[float, float]:
    """Return their sum and that of squares; overwrites `magnitudes`, bringing them to at most 1.

    The factor is a power of two, so nothing is rounded, in two halves, since 2^149 is no float32.
    """
    exponent = frexp(abs_max)[1]
    half = exponent // 2
    magnitudes.mul_(2.0**-half).mul_(2.0 ** (half - exponent))
    abs_sum = magnitudes.sum().item()
    sum_squares = magnitudes.square_().sum().item()
    return _scaled_back(abs_sum, exponent), _scaled_back(sum_squares, 2 * exponent)


def _scaled_back(scaled: float, exponent: int) -> float:
    try:
        return ldexp(scaled, exponent)
    except OverflowError:
        return float_info.max


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
            sums, smallest, largest, abs_sums = self._reduced(batch, size, wanted)
            ordinary = (
                (smallest >= self._normal_min)
                & (sums >= TRUSTED_SUM_MIN)
                & (sums <= float_info.max)
            )
            peaks, floors = self._root(largest), self._root(smallest)
            rows_found = zip(
                *(found.tolist() for found in (ordinary, sums, peaks, floors, abs_sums)),
                strict=True,
            )
            for number, (usable, squares, peak, floor, abs_sum) in enumerate(rows_found, start):
                yield (
                    number,
                    Tally(wanted, squares, peak, 0, 0, 0, size, floor, abs_sum) if usable else None,
                )

    def _reduced(
        self, batch: Sequence[torch.Tensor], size: int, wanted: frozenset[str]
    ) -> tuple[npt.NDArray[np.floating], ...]:
        """Return the sum, smallest and largest of each tensor's squares, and its magnitudes' sum.

        The last one is NaN where it is not wanted.
        """
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
        if "abs_sum" not in wanted:
            return sums, smallest, largest, np.full_like(sums, nan)
        abs_sums = squares.copy_(packed).abs_().sum(dim=1).numpy().astype(np.float64)
        return sums, smallest, largest, abs_sums

    def _root(self, squares: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Return the rounded roots; NaN and what lies beyond is not looked at."""
        with np.errstate(invalid="ignore", over="ignore"):
            return np.sqrt(squares.astype(np.float64)).astype(self._number)
