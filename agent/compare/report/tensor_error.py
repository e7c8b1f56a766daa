"""The error of a candidate's tensor against the reference's."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """Differences between a candidate and its reference, over one or several tensors.

    Sums and the cosine are over the elements that are finite on both sides; what is finite in the
    reference alone is counted in `overflow_ratio` and `nan_ratio`.
    """

    elements: int
    relative_l2: float
    """‖candidate − reference‖₂ / ‖reference‖₂; 0 where both are zero, Inf where only the latter."""
    mean_abs: float
    max_abs: float
    ulps_mean: float
    """In units in the last place of the candidate's format, at the reference's magnitude."""
    ulps_max: float
    cosine: float
    overflow_ratio: float
    """±Inf in the candidate where the reference is finite, 0 to 1 of all elements."""
    nan_ratio: float
    """NaN in the candidate where the reference is finite."""
    underflow_ratio: float
    """Zero in the candidate where the reference is not."""
    subnormal_ratio: float
    """Not zero, but below the smallest normal number of the candidate's format."""
    reference_nonfinite_ratio: float
    """NaN and ±Inf in the reference."""

    @property
    def nonfinite_ratio(self) -> float:
        """±Inf and NaN that the reference does not have."""
        return self.overflow_ratio + self.nan_ratio
