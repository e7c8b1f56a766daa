"""The columns of a ring record: what each number is, and how ranks' values become one.

A column is declared here once. The probe fills it, the ring stores it as a float64, the merge
applies its algebra. In the ring NaN means "not observed on this step"; no exporter ever sees it.
"""

from dataclasses import dataclass
from enum import Enum


class Algebra(Enum):
    """How the values of several ranks become one; every member is associative and commutative."""

    SUM = "sum"
    """Add the shards; of equal replicas take one."""

    MAX = "max"
    """The largest. Also for flags (any rank) and for values that are equal on all ranks."""

    MIN = "min"
    """The smallest."""

    MEAN = "mean"
    """The mean over the ranks that observed a value."""

    OWN = "own"
    """Belongs to its rank; never merged."""


@dataclass(frozen=True, slots=True)
class Column:
    """One float64 of a record: its name (with unit), algebra and meaning."""

    name: str
    algebra: Algebra
    meaning: str


STEP_COLUMNS = (
    Column("loss", Algebra.MEAN, "sum over the backwards of the step; absent when not finite"),
    Column("loss_nonfinite", Algebra.MAX, "1 if the loss was NaN or Inf, else 0"),
    Column("loss_scale", Algebra.MAX, "GradScaler's scale in force during the step"),
    Column("skipped", Algebra.MAX, "1 if GradScaler skipped the update, else 0"),
    Column("clip_max_norm", Algebra.MAX, "limit given to gradient clipping"),
    Column("clip_norm", Algebra.MAX, "total norm that gradient clipping computed"),
    Column("learning_rate", Algebra.MAX, "learning rate of the first parameter group"),
    Column("tokens", Algebra.SUM, "tokens given to observe() for this step"),
    Column("step_seconds", Algebra.MAX, "wall time since the end of the previous step"),
    Column("compute_seconds", Algebra.OWN, "time before the rank's first collective of the step"),
    Column("probe_seconds", Algebra.OWN, "host time that the probe itself took in this step"),
    Column(
        "gradients_reduced",
        Algebra.MIN,
        "1 if wrappers reduced the gradients over all replicas before the step, 0 if each rank "
        "steps with its own; absent where no wrapper reduces any",
    ),
    Column(
        "weight_digest",
        Algebra.OWN,
        "bits of this rank's weights after the step, as integers summed modulo 2^48; on steps on "
        "which layers are looked at by plan. Ranks whose tuples of (group, shard_index) over all "
        "shares are equal hold the same weights, and must have equal digests; others have nothing "
        "to compare",
    ),
)
"""What a rank knows of a step as a whole."""

GRADIENT_COLUMNS = (
    Column("sum_squares", Algebra.SUM, "sum of squares of the finite elements, unscaled, pre-clip"),
    Column("abs_max", Algebra.MAX, "largest magnitude among the finite elements"),
    Column("zero_elements", Algebra.SUM, "elements equal to zero (either sign)"),
    Column("nan_elements", Algebra.SUM, "elements that are NaN"),
    Column("inf_elements", Algebra.SUM, "elements that are +Inf or -Inf"),
    Column("elements", Algebra.SUM, "elements looked at"),
)
"""What is known of a set of gradient elements: one share of a rank, or one layer on a rank."""

STEP_COLUMN_NAMES = tuple(column.name for column in STEP_COLUMNS)
GRADIENT_COLUMN_NAMES = tuple(column.name for column in GRADIENT_COLUMNS)
