"""What has been counted of a set of gradients so far, in double precision."""

from dataclasses import dataclass
from sys import float_info


@dataclass(slots=True)
class Tally:
    """Running statistics of still scaled gradients."""

    sum_squares: float = 0.0
    abs_max: float = 0.0
    zero_elements: int = 0
    nan_elements: int = 0
    inf_elements: int = 0
    elements: int = 0

    def row(self, inverse_scale: float) -> tuple[float, ...]:
        """Return the unscaled gradients' columns, in the order of `GRADIENT_COLUMN_NAMES`."""
        return (
            min(self.sum_squares * inverse_scale * inverse_scale, float_info.max),
            min(self.abs_max * inverse_scale, float_info.max),
            self.zero_elements,
            self.nan_elements,
            self.inf_elements,
            self.elements,
        )
