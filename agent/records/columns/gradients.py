"""What is known of gradients on every step."""

from collections.abc import Sequence

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

_SQUARES, _LARGEST, _ELEMENTS = map(GRADIENTS.names.index, ("sum_squares", "abs_max", "elements"))
_NONFINITE = tuple(map(GRADIENTS.names.index, GRADIENTS.nonfinite))


def shows_reduction(row: Sequence[float]) -> bool:
    """Return whether the row of a gradient is such that no two ranks have it by chance.

    Not one that has the same magnitude everywhere, such as that of a bias added to a mean.
    """
    if any(row[place] > 0 for place in _NONFINITE) or not row[_SQUARES] > 0.0:
        return False
    return row[_SQUARES] < row[_LARGEST] ** 2 * row[_ELEMENTS] * (1.0 - 1e-9)
