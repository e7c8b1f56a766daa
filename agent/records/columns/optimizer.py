"""What the optimizer does, on sampled steps."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import sampled
from mp_agent.records.columns.family import ColumnFamily

OPTIMIZER = ColumnFamily(
    name="optimizer",
    row="elements of parameters, after the optimizer's step",
    columns=(
        sampled("elements", Algebra.SUM, "elements of weights looked at"),
        sampled("weight_sum_squares", Algebra.SUM, "sum of squares of the finite weights"),
        sampled("nonfinite_weights", Algebra.SUM, "weights that are NaN or Inf"),
        sampled(
            "compared_elements",
            Algebra.SUM,
            "weights that were kept before the step to compare with, finite before and after it",
        ),
        sampled("compared_sum_squares", Algebra.SUM, "sum of their squares before the step"),
        sampled("update_sum_squares", Algebra.SUM, "sum of squares of what the step added to them"),
        sampled(
            "rounded_elements",
            Algebra.SUM,
            "those of formats of at most 16 bits whose gradient, or its moving average, is not "
            "zero: the step was to change them",
        ),
        sampled("lost_updates", Algebra.SUM, "those of these that are what they were before"),
        sampled(
            "moment_elements",
            Algebra.SUM,
            "elements with a second moment (moving average of the squared gradient) in the "
            "optimizer's state",
        ),
        sampled(
            "active_elements",
            Algebra.SUM,
            "those whose gradient, its moving average or second moment is not zero, all finite",
        ),
        sampled(
            "below_epsilon_elements",
            Algebra.SUM,
            "active elements of which the root of the second moment, corrected for its bias, is "
            "below epsilon",
        ),
        sampled(
            "lost_epsilon_elements",
            Algebra.SUM,
            "elements with a second moment in a format whose smallest number is above epsilon",
        ),
        sampled(
            "squared_ratio_sum",
            Algebra.SUM,
            "sum over the active elements of the squared gradient, as the optimizer saw it, "
            "divided by the second moment, corrected for its bias, or by epsilon squared where "
            "that is larger",
        ),
        sampled("learning_rate", Algebra.MAX, "largest learning rate of a parameter group"),
        sampled("learning_rate_min", Algebra.MIN, "smallest learning rate of a parameter group"),
    ),
    key="weight_sum_squares",
    required=("weight_sum_squares", "elements"),
    size="elements",
    nonfinite=("nonfinite_weights",),
    counts_when_skipped=False,
)
