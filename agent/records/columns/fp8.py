"""What FP8 makes of the operands of linear layers, on sampled steps."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import sampled
from mp_agent.records.columns.family import ColumnFamily

FP8 = ColumnFamily(
    name="fp8",
    row="operands of linear layers, of every rank's own part of the batch and of the weights",
    columns=(
        sampled("tensors", Algebra.SUM, "tensors looked at: inputs, weights, gradients of outputs"),
        sampled("nonfinite_elements", Algebra.SUM, "elements of those that are NaN or Inf"),
        sampled("input_elements", Algebra.SUM, "finite elements of inputs that are not zero"),
        sampled(
            "input_flushed_elements",
            Algebra.SUM,
            "those that E4M3 rounds to zero, when the largest becomes E4M3's largest number",
        ),
        sampled("weight_elements", Algebra.SUM, "finite elements of weights that are not zero"),
        sampled("weight_flushed_elements", Algebra.SUM, "those that E4M3 rounds to zero, likewise"),
        sampled(
            "gradient_elements",
            Algebra.SUM,
            "finite elements of the outputs' gradients that are not zero",
        ),
        sampled(
            "gradient_flushed_elements", Algebra.SUM, "those that E5M2 rounds to zero, likewise"
        ),
        sampled(
            "scaled_tensors",
            Algebra.SUM,
            "tensors cast with a scale from an earlier step, whose amax was recorded; absent "
            "without delayed scaling",
        ),
        sampled("saturated_tensors", Algebra.SUM, "those whose amax was beyond the format's range"),
        sampled(
            "range_used_max",
            Algebra.MAX,
            "amax times scale divided by the format's largest number, of the tensor where it is "
            "largest; above 1 it was saturated",
        ),
        sampled("range_used_min", Algebra.MIN, "the same where it is smallest"),
        sampled("scale_min", Algebra.MIN, "the smallest scale in force"),
        sampled("scale_max", Algebra.MAX, "the largest scale in force"),
        sampled("amax_max", Algebra.MAX, "the largest amax"),
    ),
    key="tensors",
    required=("tensors",),
    size="tensors",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the other statistics leave those out."""
