"""The columns of a ring record: what each number is, and how it is computed with.

A column is declared here once. The probe's kernels fill it under its name, the ring stores it as a
float64, the merge applies its algebra. NaN means "not observed": in the ring, on the wire and in
tables. Where values go by name, an absent one is not there; no exporter ever sees NaN.

`FAMILIES` declares the tables: each family has one row per share in the record of a step, and one
row per layer in the table of a sampled step. Ring, merge, reports, flight records and series follow
the declaration.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import isfinite, isnan

from mp_agent.errors import CatalogError
from mp_agent.records.algebra import Algebra


class Tier(Enum):
    """How often a column of a family is measured."""

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
    """One float64 of a record: its name (with unit), algebra and meaning."""

    name: str
    algebra: Algebra
    meaning: str
    tier: Tier = Tier.EVERY_STEP
    unscaling: Unscaling = Unscaling.NONE
    signed: bool = False
    """Whether a value may be negative; otherwise a report with one is refused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnFamily:
    """Statistics that are measured together: what a row is of, its columns, and when it counts.

    A row is of the elements that a rank has of one share, or of one layer. Of both kinds of rows
    shards are united by the columns' algebra, and of equal replicas one is taken. Column names are
    unique within a family. Raises CatalogError for columns that cannot be merged so.
    """

    name: str
    row: str
    """What a row is of."""
    columns: tuple[Column, ...]
    key: str
    """The column that is there whenever a row was measured; without it no row counts."""
    required: tuple[str, ...]
    """What a layer's row must have to count."""
    size: str
    """The column with the number of elements; a row of 0 elements was not measured."""
    nonfinite: tuple[str, ...] = ()
    """Columns with the numbers of elements that are not finite; a row that has any does not count,
    and replicas of it are compared by these and by `size` alone."""
    compares_replicas: bool = False
    """Whether replicas of a share are expected to have equal rows."""
    counts_when_skipped: bool = True
    """Whether rows of a step count whose update GradScaler skipped."""
    of_parameters: bool = True
    """Whether rows are of parameters, and of their shares; other families have shares of their own,
    and take no room where nothing of them is measured."""

    def __post_init__(self) -> None:
        for column in self.columns:
            if column.algebra in (Algebra.MEAN, Algebra.OWN):
                raise CatalogError(
                    f"{column.name}: algebra {column.algebra.value} does not exist for {self.name}"
                )
        if len(set(self.names)) != len(self.names):
            raise CatalogError(f"{self.name}: names of columns are not unique")
        needed = {self.key, self.size, *self.required, *self.nonfinite}
        if unknown := needed - set(self.names):
            raise CatalogError(f"{self.name}: {', '.join(sorted(unknown))} is no column")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in the order of a row."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def sampled(self) -> tuple[str, ...]:
        """The names of the columns that are not measured on every step."""
        return tuple(column.name for column in self.columns if column.tier is Tier.SAMPLED)

    @property
    def cadence(self) -> Tier:
        """How often there is a row of a share; layers are sampled in any case."""
        tiers = {column.tier for column in self.columns}
        return Tier.EVERY_STEP if Tier.EVERY_STEP in tiers else Tier.SAMPLED

    def nonfinite_elements(self, values: Mapping[str, float]) -> float:
        """Return how many elements of a row, given by name, are not finite."""
        elements = 0.0
        for name in self.nonfinite:
            elements += values.get(name, 0.0)
        return elements

    def counts(self, values: Mapping[str, float]) -> bool:
        """Return whether a row, given by name, was measured and is of finite elements only."""
        return self.key in values and self.nonfinite_elements(values) == 0.0

    def with_last_sample(
        self, values: Mapping[str, float], before: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return a row, by name, with sampled columns from `before` if it has none of its own."""
        if not self.sampled or any(name in values for name in self.sampled):
            return values
        return {**{name: before[name] for name in self.sampled if name in before}, **values}

    def merged(self, rows: Iterable[Sequence[float]]) -> dict[str, float]:
        """Return rows, at least one, as one; without what none has or what is beyond float64."""
        values = {
            column.name: column.algebra.merged(found)
            for column, found in zip(self.columns, zip(*rows, strict=True), strict=True)
        }
        return {name: value for name, value in values.items() if isfinite(value)}


_COMMON_STEP_COLUMNS = (
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
"""What every rank knows of a step as a whole."""

GUARD_COLUMNS = tuple(
    Column(
        f"guard_{action}",
        Algebra.MAX,
        f"1 if the guard {meaning}, 0.5 if it would have but for a dry run, 0 if not",
    )
    for action, meaning in (
        ("skip_update", "skipped the update"),
        ("clip_gradients", "scaled the gradients down"),
        ("lower_learning_rate", "lowered the learning rate"),
        ("raise_loss_scale", "raised the loss scale"),
        ("widen_precision", "switched modules to a wider precision"),
        ("request_checkpoint", "asked for a checkpoint"),
        ("request_stop", "asked the training to stop"),
        ("none_left", "was to act, and had acted too often to do so"),
    )
)
"""What a rank with a guard knows besides; rings and reports without one leave them out."""

STEP_COLUMNS = (*_COMMON_STEP_COLUMNS, *GUARD_COLUMNS)
"""All that a rank may know of a step as a whole; what not every rank has comes last."""


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


def _sampled(name: str, algebra: Algebra, meaning: str, *, signed: bool = False) -> Column:
    return Column(name, algebra, meaning, Tier.SAMPLED, signed=signed)


OPTIMIZER = ColumnFamily(
    name="optimizer",
    row="elements of parameters, after the optimizer's step",
    columns=(
        _sampled("elements", Algebra.SUM, "elements of weights looked at"),
        _sampled("weight_sum_squares", Algebra.SUM, "sum of squares of the finite weights"),
        _sampled("nonfinite_weights", Algebra.SUM, "weights that are NaN or Inf"),
        _sampled(
            "compared_elements",
            Algebra.SUM,
            "weights that were kept before the step to compare with, finite before and after it",
        ),
        _sampled("compared_sum_squares", Algebra.SUM, "sum of their squares before the step"),
        _sampled(
            "update_sum_squares", Algebra.SUM, "sum of squares of what the step added to them"
        ),
        _sampled(
            "rounded_elements",
            Algebra.SUM,
            "those of formats of at most 16 bits whose gradient, or its moving average, is not "
            "zero: the step was to change them",
        ),
        _sampled("lost_updates", Algebra.SUM, "those of these that are what they were before"),
        _sampled(
            "moment_elements",
            Algebra.SUM,
            "elements with a second moment (moving average of the squared gradient) in the "
            "optimizer's state",
        ),
        _sampled(
            "active_elements",
            Algebra.SUM,
            "those whose gradient, its moving average or second moment is not zero, all finite",
        ),
        _sampled(
            "below_epsilon_elements",
            Algebra.SUM,
            "active elements of which the root of the second moment, corrected for its bias, is "
            "below epsilon",
        ),
        _sampled(
            "lost_epsilon_elements",
            Algebra.SUM,
            "elements with a second moment in a format whose smallest number is above epsilon",
        ),
        _sampled(
            "squared_ratio_sum",
            Algebra.SUM,
            "sum over the active elements of the squared gradient, as the optimizer saw it, "
            "divided by the second moment, corrected for its bias, or by epsilon squared where "
            "that is larger",
        ),
        _sampled("learning_rate", Algebra.MAX, "largest learning rate of a parameter group"),
        _sampled("learning_rate_min", Algebra.MIN, "smallest learning rate of a parameter group"),
    ),
    key="weight_sum_squares",
    required=("weight_sum_squares", "elements"),
    size="elements",
    nonfinite=("nonfinite_weights",),
    counts_when_skipped=False,
)

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
        _sampled("elements", Algebra.SUM, "elements looked at"),
        _sampled("nonfinite_elements", Algebra.SUM, "elements that are NaN or Inf"),
        _sampled("sum", Algebra.SUM, "sum of the finite elements, unscaled", signed=True),
        _sampled("sum_squares", Algebra.SUM, "sum of their squares, unscaled"),
        _sampled("nonzero_elements", Algebra.SUM, "finite elements that are not zero"),
        _sampled(
            "fp16_elements",
            Algebra.SUM,
            "all of these where there is a loss scale, what the next six columns are parts of; "
            "absent without one",
        ),
        _sampled("flushed_elements", Algebra.SUM, "those that FP16 rounds to zero when scaled"),
        _sampled("flushed_at_half_elements", Algebra.SUM, "the same at half the loss scale"),
        _sampled("flushed_at_double_elements", Algebra.SUM, "the same at twice the loss scale"),
        _sampled("subnormal_elements", Algebra.SUM, "those that are subnormal in FP16 when scaled"),
        _sampled("near_overflow_elements", Algebra.SUM, "those above 60 000 when scaled"),
        _sampled(
            "overflow_at_double_elements",
            Algebra.SUM,
            "those that FP16 rounds to Inf at twice the loss scale",
        ),
        *(
            _sampled(
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


ACTIVATIONS = ColumnFamily(
    name="activations",
    row="elements of the outputs of modules, of every rank's own part of the batch",
    columns=(
        _sampled("elements", Algebra.SUM, "elements looked at"),
        _sampled("sum", Algebra.SUM, "sum of the finite elements", signed=True),
        _sampled("sum_squares", Algebra.SUM, "sum of squares of the finite elements"),
        _sampled("abs_max", Algebra.MAX, "largest magnitude among the finite elements"),
        _sampled("zero_elements", Algebra.SUM, "elements equal to zero (either sign)"),
        _sampled("nan_elements", Algebra.SUM, "elements that are NaN"),
        _sampled("inf_elements", Algebra.SUM, "elements that are +Inf or -Inf"),
        _sampled(
            "near_overflow_elements",
            Algebra.SUM,
            "finite elements of FP16 outputs with a magnitude above `fp16_near_overflow`",
        ),
        _sampled(
            "nonfinite_call",
            Algebra.MIN,
            "which call of a module in the step, counted from 0, was the first with an output that "
            "is not finite; absent without any",
        ),
    ),
    key="elements",
    required=("elements", "abs_max"),
    size="elements",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the other statistics leave those out."""

ATTENTION = ColumnFamily(
    name="attention",
    row="attention logits of a few heads and positions, of every rank's own part of the batch",
    columns=(
        _sampled("elements", Algebra.SUM, "logits looked at, those that are masked left out"),
        _sampled("nonfinite_elements", Algebra.SUM, "those that are NaN or Inf"),
        _sampled("logit_max", Algebra.MAX, "the largest finite one", signed=True),
    ),
    key="elements",
    required=("elements", "logit_max"),
    size="elements",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the largest leaves those out."""

LOGITS = ColumnFamily(
    name="logits",
    row="rows of the logits that the loss is of, a few of every rank's own part of the batch",
    columns=(
        _sampled("rows", Algebra.SUM, "rows looked at, those with an ignored target left out"),
        _sampled("nonfinite_rows", Algebra.SUM, "those whose log-sum-exp is NaN or Inf"),
        _sampled("logit_max", Algebra.MAX, "the largest finite logit", signed=True),
        _sampled("logsumexp_max", Algebra.MAX, "the largest finite log-sum-exp", signed=True),
        _sampled("logsumexp_min", Algebra.MIN, "the smallest finite log-sum-exp", signed=True),
        _sampled("logsumexp_sum", Algebra.SUM, "sum of the finite log-sum-exps", signed=True),
    ),
    key="rows",
    required=("rows",),
    size="rows",
    of_parameters=False,
)
"""Rows count with log-sum-exps that are not finite: the other columns leave those out."""

FAMILIES: tuple[ColumnFamily, ...] = (
    GRADIENTS,
    OPTIMIZER,
    DISTRIBUTION,
    ACTIVATIONS,
    ATTENTION,
    LOGITS,
)
"""All of them. When there are too many series, the layers of the last family give way first."""

STEP_COLUMN_NAMES = tuple(column.name for column in STEP_COLUMNS)
GRADIENT_COLUMN_NAMES = GRADIENTS.names

GRADIENT_POSITIONS: Mapping[str, int] = {
    name: position for position, name in enumerate(GRADIENT_COLUMN_NAMES)
}
"""Where a column stands in the rows that the probe writes and the merge holds."""

STEP_COLUMNS_BY_NAME: Mapping[str, Column] = {column.name: column for column in STEP_COLUMNS}
"""The columns of a step as a whole by name."""

COLUMNS: Mapping[str, Column] = {
    column.name: column for column in (*STEP_COLUMNS, *GRADIENT_COLUMNS)
}
"""Those and the columns of the gradients by name; other families may use the same names."""


def step_columns(*, guarded: bool) -> tuple[str, ...]:
    """Return the names of the step columns of a rank with a guard, or without one."""
    return tuple(column.name for column in (STEP_COLUMNS if guarded else _COMMON_STEP_COLUMNS))


def by_name(names: Iterable[str], values: Iterable[float]) -> dict[str, float]:
    """Return the values that were observed, by name."""
    return {name: value for name, value in zip(names, values, strict=True) if not isnan(value)}
