"""Columns of gradients, optimizers, updates, and of what replicas are compared by."""

from collections.abc import Sequence

from mp_agent.records.columns.column import Algebra, Column, ColumnFamily, Tier, Unscaling, sampled


def _gradient(
    name: str,
    algebra: Algebra,
    meaning: str,
    *,
    tier: Tier = Tier.EVERY_STEP,
    unscaling: Unscaling = Unscaling.NONE,
) -> Column:
    return Column(name, algebra, meaning, tier, unscaling)


GRADIENT_COLUMNS = (
    _gradient(
        "sum_squares",
        Algebra.SUM,
        "sum of squares of the finite elements, unscaled, pre-clip",
        unscaling=Unscaling.SQUARED,
    ),
    _gradient(
        "abs_max",
        Algebra.MAX,
        "largest magnitude among the finite elements",
        unscaling=Unscaling.LINEAR,
    ),
    _gradient("zero_elements", Algebra.SUM, "elements equal to zero (either sign)"),
    _gradient("nan_elements", Algebra.SUM, "elements that are NaN"),
    _gradient("inf_elements", Algebra.SUM, "elements that are +Inf or -Inf"),
    _gradient("elements", Algebra.SUM, "elements looked at"),
    _gradient(
        "abs_min",
        Algebra.MIN,
        "smallest magnitude among the finite elements that are not zero; absent without any",
        unscaling=Unscaling.LINEAR,
    ),
    _gradient(
        "abs_sum",
        Algebra.SUM,
        "sum of the magnitudes of the finite elements",
        tier=Tier.LAYERS,
        unscaling=Unscaling.LINEAR,
    ),
)
"""What is known of a set of gradient elements."""

GRADIENTS = ColumnFamily(
    name="gradients",
    row="gradient elements",
    columns=GRADIENT_COLUMNS,
    key="sum_squares",
    required=("sum_squares", "abs_max", "zero_elements", "elements"),
    size="elements",
    nonfinite=("nan_elements", "inf_elements"),
    compares_replicas=True,
    counts_when_skipped=False,
)

_SQUARES, _LARGEST, _ELEMENTS = map(GRADIENTS.names.index, ("sum_squares", "abs_max", "elements"))
_NONFINITE = tuple(map(GRADIENTS.names.index, GRADIENTS.nonfinite))


def shows_reduction(row: Sequence[float]) -> bool:
    """Return whether the row of a gradient is such that no two ranks have it by chance.

    Not one that has the same magnitude everywhere, such as that of a bias added to a mean.
    """
    if any(row[place] > 0 for place in _NONFINITE) or not row[_SQUARES] > 0.0:
        return False
    # Not `**`, which raises beyond the range of a float, where this is infinite.
    return row[_SQUARES] < row[_LARGEST] * row[_LARGEST] * row[_ELEMENTS] * (1.0 - 1e-9)


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
            "that is larger; -Inf where the second moment is not that of the gradient",
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


WEIGHTS = ColumnFamily(
    name="weights",
    row="elements of parameters, before the optimizer's step",
    columns=(
        sampled("bits", Algebra.SUM, "their bits, as integers of 32 bits, summed modulo 2^32"),
        sampled(
            "varied",
            Algebra.MAX,
            "1 if elements differ from each other, so that equal bits on two ranks show a copy; 0 "
            "if they are all the same; absent where ranks may begin with equal tensors that are no "
            "copies, and where a wrapper says which are",
        ),
        sampled("elements", Algebra.SUM, "elements looked at"),
    ),
    key="bits",
    required=("bits", "elements"),
    size="elements",
    compares_replicas=True,
    compared_only=True,
)
"""Sums over layers stay exact in a float64 up to 2^21 layers."""

FEW_WEIGHTS = ColumnFamily(
    name="few_weights",
    row="a few elements of some parameters, before the optimizer's step",
    columns=(
        sampled("bits", Algebra.SUM, "their bits, as integers of 32 bits, summed modulo 2^32"),
        sampled("elements", Algebra.SUM, "elements looked at"),
    ),
    key="bits",
    required=("bits", "elements"),
    size="elements",
    compares_replicas=True,
    compared_only=True,
)
"""On steps on which the weights are not looked at; other ones each time, of all ranks alike."""

STATE = ColumnFamily(
    name="state",
    row="elements of what a checkpoint holds and no optimizer steps: frozen parameters, buffers",
    columns=(
        sampled("bits", Algebra.SUM, "bits of a part of them, summed modulo 2^32"),
        sampled("varied", Algebra.MAX, "1 if elements of that part differ from each other"),
        sampled(
            "copied",
            Algebra.MAX,
            "1 if a wrapper made copies of the tensor and leaves them to the script, -1 if it is "
            "local to each rank by design, 0 if neither is known",
            signed=True,
        ),
    ),
    key="bits",
    required=("bits",),
    size="bits",
    of_parameters=False,
    of_some_ranks=True,
    compared_only=True,
)
