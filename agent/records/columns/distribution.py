"""How gradients are distributed, on sampled steps."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import sampled
from mp_agent.records.columns.family import ColumnFamily

EXPONENTS = tuple(range(-48, 16, 4))
"""Lower bounds of the bins of a gradient's magnitudes, as powers of two; each is 4 binades wide.
The first bin has all smaller numbers but zero as well, the last all larger ones."""


def exponent_column(exponent: int) -> str:
    """Return the name of the column of a bin, by its lower bound."""
    return f"from_2_to_{'minus_' if exponent < 0 else ''}{abs(exponent)}"


DISTRIBUTION = ColumnFamily(
    name="distribution",
    row="gradient elements",
    columns=(
        sampled("elements", Algebra.SUM, "elements looked at"),
        sampled("nonfinite_elements", Algebra.SUM, "elements that are NaN or Inf"),
        sampled("sum", Algebra.SUM, "sum of the finite elements, unscaled", signed=True),
        sampled("sum_squares", Algebra.SUM, "sum of their squares, unscaled"),
        sampled("nonzero_elements", Algebra.SUM, "finite elements that are not zero"),
        sampled(
            "fp16_elements",
            Algebra.SUM,
            "all of these where there is a loss scale, what the next six columns are parts of; "
            "absent without one",
        ),
        sampled("flushed_elements", Algebra.SUM, "those that FP16 rounds to zero when scaled"),
        sampled("flushed_at_half_elements", Algebra.SUM, "the same at half the loss scale"),
        sampled("flushed_at_double_elements", Algebra.SUM, "the same at twice the loss scale"),
        sampled("subnormal_elements", Algebra.SUM, "those that are subnormal in FP16 when scaled"),
        sampled("near_overflow_elements", Algebra.SUM, "those above 60 000 when scaled"),
        sampled(
            "overflow_at_double_elements",
            Algebra.SUM,
            "those that FP16 rounds to Inf at twice the loss scale",
        ),
        *(
            sampled(
                exponent_column(exponent),
                Algebra.SUM,
                f"unscaled magnitudes from 2^{exponent} to below 2^{exponent + 4}",
            )
            for exponent in EXPONENTS
        ),
    ),
    key="sum_squares",
    required=("sum_squares", "elements"),
    size="elements",
    nonfinite=("nonfinite_elements",),
    counts_when_skipped=False,
)
