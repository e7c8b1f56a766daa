"""What is known of gradients on every step."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import Column, Tier, Unscaling
from mp_agent.records.columns.family import ColumnFamily


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
