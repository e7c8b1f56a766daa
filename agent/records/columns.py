"""The columns of a ring record: what each number is, and how it is computed with.

A column is declared here once. The probe's kernels fill it under its name, the ring stores it as a
float64, the merge applies its algebra. NaN means "not observed": in the ring, on the wire and in
tables. Where values go by name, an absent one is not there; no exporter ever sees NaN.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import isnan

from mp_agent.errors import CatalogError
from mp_agent.records.algebra import Algebra


class ColumnFamily(Enum):
    """What a column is of."""

    STEP = "step"
    """A rank's step as a whole."""

    GRADIENT = "gradient"
    """A set of gradient elements: one share of a rank, or one layer on a rank."""


class Tier(Enum):
    """How often a gradient column is measured."""

    EVERY_STEP = "every step"

    SAMPLED = "sampled"
    """When layers are looked at; absent from the totals of other steps."""


class Unscaling(Enum):
    """How the value of scaled gradients follows the loss scale: the power of it to divide by."""

    NONE = 0
    LINEAR = 1
    SQUARED = 2


@dataclass(frozen=True, slots=True)
class Column:
    """One float64 of a record: its name (with unit), algebra and meaning.

    Raises CatalogError for a gradient column whose algebra cannot be folded at every stage.
    """

    name: str
    algebra: Algebra
    meaning: str
    family: ColumnFamily = ColumnFamily.STEP
    tier: Tier = Tier.EVERY_STEP
    unscaling: Unscaling = Unscaling.NONE

    def __post_init__(self) -> None:
        if self.family is ColumnFamily.GRADIENT and self.algebra in (Algebra.MEAN, Algebra.OWN):
            raise CatalogError(
                f"{self.name}: algebra {self.algebra.value} does not exist for gradient columns"
            )


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
    Column(
        "gradients_measured",
        Algebra.MIN,
        "1 if the gradients of the run were measured, 0 if they were left out: to stay within "
        "overhead_budget, or in a CUDA graph. Where any rank left them out, the step has none",
    ),
    Column(
        "measuring_interval_steps", Algebra.MAX, "gradients are measured on every so many steps"
    ),
    Column("layer_interval_steps", Algebra.MAX, "layers are measured on every so many steps"),
    Column(
        "probe_device_seconds",
        Algebra.OWN,
        "device time between the beginning and the end of measuring the gradients of this step",
    ),
    Column(
        "host_overhead_ratio",
        Algebra.OWN,
        "share of the time of recent steps that the probe took on the host",
    ),
    Column(
        "device_overhead_ratio",
        Algebra.OWN,
        "share of the time of recent steps that the probe took on the device",
    ),
)
"""What a rank knows of a step as a whole."""


def _gradient(
    name: str,
    algebra: Algebra,
    meaning: str,
    *,
    tier: Tier = Tier.EVERY_STEP,
    unscaling: Unscaling = Unscaling.NONE,
) -> Column:
    return Column(name, algebra, meaning, ColumnFamily.GRADIENT, tier, unscaling)


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

NORM_COLUMNS = ("sum_squares", "abs_max", "zero_elements", "elements")
"""What is always there of gradients whose norm counts."""

STEP_COLUMN_NAMES = tuple(column.name for column in STEP_COLUMNS)
GRADIENT_COLUMN_NAMES = tuple(column.name for column in GRADIENT_COLUMNS)

GRADIENT_POSITIONS: Mapping[str, int] = {
    name: position for position, name in enumerate(GRADIENT_COLUMN_NAMES)
}
"""Where a column stands in the rows that the probe writes and the merge holds."""

COLUMNS: Mapping[str, Column] = {
    column.name: column for column in (*STEP_COLUMNS, *GRADIENT_COLUMNS)
}
"""All of them by name."""


def by_name(names: Iterable[str], values: Iterable[float]) -> dict[str, float]:
    """Return the values that were observed, by name."""
    return {name: value for name, value in zip(names, values, strict=True) if not isnan(value)}
