"""Statistics of the rows of a packed scratch, under their names, and how rows become groups."""

from dataclasses import dataclass

import torch

from mp_agent.probe.statistics.packing import PackedLayout


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

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> "RawRows":
        """Return room for so many rows."""
        norms_R = torch.empty(rows, dtype=torch.float64, device=device)
        return cls(norms_R, *torch.empty((4, rows), dtype=dtype, device=device))

    def part(self, rows: slice) -> "RawRows":
        """Return views of some rows."""
        return RawRows(
            self.norms_R[rows],
            self.nonzero_R[rows],
            self.numbers_R[rows],
            self.finite_R[rows],
            self.peaks_R[rows],
        )

    def statistics(self) -> "RowStatistics":
        """Return float64 statistics that can be folded."""
        counts_3R = torch.stack((self.nonzero_R, self.numbers_R, self.finite_R)).double()
        return RowStatistics(
            sums_SR=torch.cat((self.norms_R.square_().unsqueeze(0), counts_3R)),
            maxima_MR=self.peaks_R.double().unsqueeze(0),
        )


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of rows, or of what rows were folded into, float64."""

    sums_SR: torch.Tensor
    """Sum of squares, and the three counts of `RawRows`."""
    maxima_MR: torch.Tensor
    """Largest magnitude; -Inf where there is no row."""

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


def by_name(groups: RowStatistics, layout: PackedLayout) -> dict[str, torch.Tensor]:
    """Return [G] by column name, of the gradients as they are."""
    squares_G, nonzero_G, numbers_G, finite_G = groups.sums_SR
    (peaks_G,) = groups.maxima_MR
    return {
        "sum_squares": squares_G,
        "abs_max": peaks_G.clamp(min=0.0),
        "zero_elements": layout.elements_G - nonzero_G,
        "nan_elements": nonzero_G - numbers_G,
        "inf_elements": numbers_G - finite_G,
        "elements": layout.elements_G,
    }
