"""Outputs of modules, on sampled steps."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import sampled
from mp_agent.records.columns.family import ColumnFamily

ACTIVATIONS = ColumnFamily(
    name="activations",
    row="elements of the outputs of modules, of every rank's own part of the batch",
    columns=(
        sampled("elements", Algebra.SUM, "elements looked at"),
        sampled("sum", Algebra.SUM, "sum of the finite elements", signed=True),
        sampled("sum_squares", Algebra.SUM, "sum of squares of the finite elements"),
        sampled("abs_max", Algebra.MAX, "largest magnitude among the finite elements"),
        sampled("zero_elements", Algebra.SUM, "elements equal to zero (either sign)"),
        sampled("nan_elements", Algebra.SUM, "elements that are NaN"),
        sampled("inf_elements", Algebra.SUM, "elements that are +Inf or -Inf"),
        sampled(
            "near_overflow_elements",
            Algebra.SUM,
            "finite elements of FP16 outputs with a magnitude above `fp16_near_overflow`",
        ),
        sampled(
            "nonfinite_call",
            Algebra.MIN,
            "which call of a module in the step, counted from 0, was the first with an output that "
            "is not finite; absent without any",
        ),
        sampled(
            "nonfinite_gradient_call",
            Algebra.MIN,
            "which gradient of an output or input of a module was the first in backward, counted "
            "from 0, that is not finite, if it is that of this module's output",
        ),
        sampled(
            "nonfinite_backward_call",
            Algebra.MIN,
            "the same number, if it is the gradient of this module's input and not of its output: "
            "then it arose in this module",
        ),
    ),
    key="elements",
    required=("elements", "abs_max"),
    size="elements",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the other statistics leave those out."""
