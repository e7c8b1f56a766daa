"""Statistics of the rows of a packed scratch, under their names, and how rows become groups."""

from dataclasses import dataclass

import torch

from mp_agent.probe.statistics.digest import DIGEST_BITS
from mp_agent.probe.statistics.packed.packing import PackedLayout
from mp_agent.probe.statistics.smallest import magnitudes


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

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> "RawRows":
        """Return room for so many rows."""
        norms_R = torch.empty(rows, dtype=torch.float64, device=device)
        nonzero_R, numbers_R, finite_R, peaks_R = torch.empty((4, rows), dtype=dtype, device=device)
        smallest_R = torch.zeros(rows, dtype=DIGEST_BITS[dtype], device=device)
        return cls(norms_R, nonzero_R, numbers_R, finite_R, peaks_R, smallest_R)

    def part(self, rows: slice) -> "RawRows":
        """Return views of some rows."""
        return RawRows(
            self.norms_R[rows],
            self.nonzero_R[rows],
            self.numbers_R[rows],
            self.finite_R[rows],
            self.peaks_R[rows],
            self.smallest_R[rows],
        )

    def statistics(self) -> "RowStatistics":
        """Return float64 statistics that can be folded."""
        counts_3R = torch.stack((self.nonzero_R, self.numbers_R, self.finite_R)).double()
        return RowStatistics(
            sums_SR=torch.cat((self.norms_R.square_().unsqueeze(0), counts_3R)),
            maxima_MR=torch.stack((self.peaks_R.double(), self._negated_smallest())),
        )

    def _negated_smallest(self) -> torch.Tensor:
        negated_R = -magnitudes(self.smallest_R, self.peaks_R.dtype).double()
        return negated_R.masked_fill_(negated_R == 0.0, -torch.inf)


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of rows, or of what rows were folded into, float64."""

    sums_SR: torch.Tensor
    """Sum of squares, and the three counts of `RawRows`."""
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
    squares_G, nonzero_G, numbers_G, finite_G = groups.sums_SR
    peaks_G, negated_G = groups.maxima_MR
    return {
        "sum_squares": squares_G,
        "abs_max": peaks_G.clamp(min=0.0),
        "zero_elements": elements_G - nonzero_G,
        "nan_elements": nonzero_G - numbers_G,
        "inf_elements": numbers_G - finite_G,
        "elements": elements_G,
        "abs_min": -negated_G.masked_fill(negated_G == -torch.inf, torch.nan),
    }
