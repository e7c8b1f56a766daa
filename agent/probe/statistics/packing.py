"""Where pieces of gradients lie in the scratch, and how its rows fold into groups."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from mp_agent.probe.statistics.pieces import DIGEST_BITS, magnitudes, send

FOLD_WIDTH = 32
"""Rows folded at a time; a group of 32^n rows is folded in n levels."""


class PieceForm(NamedTuple):
    """What of a piece its place in the scratch depends on."""

    dtype: torch.dtype
    shape: torch.Size


Forms = tuple[tuple[PieceForm, ...], ...]
"""The forms of the pieces of each group."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of one dtype that are in the scratch at the same time, and fill it where they can."""

    pieces: tuple[int, ...]
    """Their numbers, counted through all groups."""
    rows: int
    targets: tuple[torch.Tensor, ...]
    """Views of the scratch with the shapes of the pieces; no two share a row."""
    tails: tuple[torch.Tensor, ...]
    """Views of what is left of rows, in which zero has to stand for no element."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How pieces of certain forms are measured with a certain scratch."""

    batches: tuple[Batch, ...]
    fold_levels: tuple[torch.Tensor, ...]
    """int64 [blocks, FOLD_WIDTH] on the device: which rows of the level before each block folds.

    One past the last row stands for no row. Every group has one block in the last level.
    """
    elements_G: torch.Tensor
    """float64 on the device."""

    @property
    def rows(self) -> int:
        """Rows of all batches together."""
        return sum(batch.rows for batch in self.batches)


def make_packed_layout(forms: Forms, scratch_RW: torch.Tensor) -> PackedLayout:
    """Return the layout of pieces in `scratch_RW`, each of which must fit into it.

    Sends the fold to the scratch's device without waiting.
    """
    batches, rows_by_piece = _batches([form for group in forms for form in group], scratch_RW)
    pieces = iter(rows_by_piece)
    rows_by_group = [[row for _ in group for row in next(pieces)] for group in forms]
    elements = [float(sum(form.shape.numel() for form in group)) for group in forms]
    device = scratch_RW.device
    return PackedLayout(
        batches=batches,
        fold_levels=tuple(
            send(np.array(level, dtype=np.int64).reshape(-1, FOLD_WIDTH), device)
            for level in fold_levels(rows_by_group)
        ),
        elements_G=send(np.array(elements, dtype=np.float64), device),
    )


def fold_levels(rows_by_group: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return, level by level, the blocks of row numbers that fold into one row of the next.

    rows_by_group: the rows of each group, all rows from 0 on in any order.
    """
    levels = []
    groups = rows_by_group
    while True:
        no_row = sum(map(len, groups))
        blocks_by_group = [_blocks(rows, no_row) for rows in groups]
        levels.append([block for blocks in blocks_by_group for block in blocks])
        if max(map(len, blocks_by_group), default=1) == 1:
            return levels
        groups = _numbered(map(len, blocks_by_group))


def _blocks(rows: Sequence[int], no_row: int) -> list[list[int]]:
    """Return the rows of a group in blocks of one width, at least one."""
    filled = [*rows, *[no_row] * (-len(rows) % FOLD_WIDTH if rows else FOLD_WIDTH)]
    return [filled[at : at + FOLD_WIDTH] for at in range(0, len(filled), FOLD_WIDTH)]


def _numbered(counts: Iterable[int]) -> list[range]:
    ends = list(accumulate(counts, initial=0))
    return [range(start, end) for start, end in pairwise(ends)]


@dataclass(slots=True)
class _Filling:
    dtype: torch.dtype
    rows: int
    pieces: list[int]


def _batches(
    forms: Sequence[PieceForm], scratch_RW: torch.Tensor
) -> tuple[tuple[Batch, ...], list[range]]:
    """Return batches, and the rows of each piece, counted through all batches.

    The largest pieces come first, and each goes into the first batch that has room for it.
    """
    scratch_rows, width = scratch_RW.shape
    sizes = [-(-form.shape.numel() // width) for form in forms]
    fillings: list[_Filling] = []
    for number in sorted(range(len(forms)), key=lambda number: -sizes[number]):
        dtype, rows = forms[number].dtype, sizes[number]
        room = (each for each in fillings if each.dtype is dtype)
        filling = next((each for each in room if each.rows + rows <= scratch_rows), None)
        if filling is None:
            fillings.append(filling := _Filling(dtype, 0, []))
        filling.rows += rows
        filling.pieces.append(number)
    rows_by_piece = [range(0)] * len(forms)
    start = 0
    for filling in fillings:
        for number in filling.pieces:
            rows_by_piece[number] = range(start, start + sizes[number])
            start += sizes[number]
    return tuple(_batch(filling, forms, scratch_RW) for filling in fillings), rows_by_piece


def _batch(filling: _Filling, forms: Sequence[PieceForm], scratch_RW: torch.Tensor) -> Batch:
    width = scratch_RW.shape[1]
    flat = scratch_RW.view(-1)
    targets, tails = [], []
    start = 0
    for number in filling.pieces:
        shape = forms[number].shape
        end = start + shape.numel()
        targets.append(flat[start:end].view(shape))
        start = -(-end // width) * width
        if start > end:
            tails.append(flat[end:start])
    return Batch(tuple(filling.pieces), filling.rows, tuple(targets), tuple(tails))


@dataclass(frozen=True, slots=True)
class RawRows:
    """What is reduced of each row, as it comes: the elements that are finite, and counts."""

    norms_R: torch.Tensor
    nonzero_R: torch.Tensor
    """Elements that are not 0."""
    numbers_R: torch.Tensor
    """Elements that are neither 0 nor NaN."""
    finite_R: torch.Tensor
    """Elements that are neither 0 nor NaN nor Inf."""
    peaks_R: torch.Tensor
    smallest_R: torch.Tensor
    """Smallest magnitudes that are not 0, as integers of `smallest.put_in_order`."""
    abs_sums_R: torch.Tensor

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> "RawRows":
        """Return room for so many rows."""
        norms_R, abs_sums_R = torch.empty((2, rows), dtype=torch.float64, device=device)
        nonzero_R, numbers_R, finite_R, peaks_R = torch.empty((4, rows), dtype=dtype, device=device)
        smallest_R = torch.zeros(rows, dtype=DIGEST_BITS[dtype], device=device)
        return cls(norms_R, nonzero_R, numbers_R, finite_R, peaks_R, smallest_R, abs_sums_R)

    def part(self, rows: slice) -> "RawRows":
        """Return views of some rows."""
        return RawRows(
            self.norms_R[rows],
            self.nonzero_R[rows],
            self.numbers_R[rows],
            self.finite_R[rows],
            self.peaks_R[rows],
            self.smallest_R[rows],
            self.abs_sums_R[rows],
        )

    def statistics(self) -> "RowStatistics":
        """Return float64 statistics that can be folded."""
        counts_3R = torch.stack((self.nonzero_R, self.numbers_R, self.finite_R)).double()
        return RowStatistics(
            sums_SR=torch.cat(
                (self.norms_R.square_().unsqueeze(0), counts_3R, self.abs_sums_R.unsqueeze(0))
            ),
            maxima_MR=torch.stack((self.peaks_R.double(), self._negated_smallest())),
        )

    def _negated_smallest(self) -> torch.Tensor:
        negated_R = -magnitudes(self.smallest_R, self.peaks_R.dtype).double()
        return negated_R.masked_fill_(negated_R == 0.0, -torch.inf)


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of rows, or of what rows were folded into, float64."""

    sums_SR: torch.Tensor
    """Sum of squares, the three counts of `RawRows`, and the sum of magnitudes."""
    maxima_MR: torch.Tensor
    """Largest magnitude, and the smallest one that is not 0, negated; -Inf where there is none."""

    def folded(self, layout: PackedLayout) -> "RowStatistics":
        """Return the statistics of each group."""
        sums_SR, maxima_MR = self.sums_SR, self.maxima_MR
        for level in layout.fold_levels:
            sums_SR = _padded(sums_SR, 0.0)[:, level].sum(dim=2)
            maxima_MR = _padded(maxima_MR, -torch.inf)[:, level].amax(dim=2)
        return RowStatistics(sums_SR, maxima_MR)


def _padded(table_SR: torch.Tensor, value: float) -> torch.Tensor:
    """Return a table with one more column, which stands for no row."""
    return torch.nn.functional.pad(table_SR, (0, 1), value=value)


def by_name(groups: RowStatistics, elements_G: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return [G] by column name, of the gradients as they are."""
    squares_G, nonzero_G, numbers_G, finite_G, abs_sums_G = groups.sums_SR
    peaks_G, negated_G = groups.maxima_MR
    return {
        "sum_squares": squares_G,
        "abs_max": peaks_G.clamp(min=0.0),
        "zero_elements": elements_G - nonzero_G,
        "nan_elements": nonzero_G - numbers_G,
        "inf_elements": numbers_G - finite_G,
        "elements": elements_G,
        "abs_min": -negated_G.masked_fill(negated_G == -torch.inf, torch.nan),
        "abs_sum": abs_sums_G,
    }
