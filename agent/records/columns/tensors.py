"""Tensors that the script watches, on sampled steps."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import sampled
from mp_agent.records.columns.distribution import exponent_column
from mp_agent.records.columns.family import ColumnFamily

TENSOR_EXPONENTS = tuple(range(-64, 32))
"""Lower bounds of the bins of a tensor's magnitudes, as powers of two; each is one binade. The
first bin has all smaller numbers but zero as well, the last all larger ones."""

TENSORS = ColumnFamily(
    name="tensors",
    row="elements of a tensor that the script watches, of every rank's own part of the batch",
    columns=(
        sampled("elements", Algebra.SUM, "elements looked at"),
        sampled("nonfinite_elements", Algebra.SUM, "elements that are NaN or Inf"),
        sampled("sum", Algebra.SUM, "sum of the finite elements", signed=True),
        sampled("sum_squares", Algebra.SUM, "sum of squares of the finite elements"),
        sampled("abs_sum", Algebra.SUM, "sum of magnitudes of the finite elements"),
        sampled("abs_max", Algebra.MAX, "largest magnitude among the finite elements"),
        sampled(
            "abs_min",
            Algebra.MIN,
            "smallest magnitude among the finite elements that are not zero; absent without any",
        ),
        sampled(
            "swallowed_sum",
            Algebra.SUM,
            "sum of the magnitudes that a running sum in the tensor's dtype, element after element "
            "on each rank, does not change by; absent for integers, whose sums are exact",
        ),
        sampled("reduction", Algebra.MAX, "1 if the script sums the elements in that dtype"),
        sampled(
            "range_ratio",
            Algebra.MAX,
            "largest range of a slice along the watched dimension, from its smallest to its "
            "largest finite element, divided by the smallest that is not zero, on the rank where "
            "that is largest; its low bits are the index of the slice at fault, see "
            "`records.slice_ratio`; absent without two such slices",
        ),
        *(
            sampled(
                exponent_column(exponent),
                Algebra.SUM,
                f"finite magnitudes from 2^{exponent} to below 2^{exponent + 1}",
            )
            for exponent in TENSOR_EXPONENTS
        ),
    ),
    key="elements",
    required=("elements",),
    size="elements",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the other statistics leave those out."""
