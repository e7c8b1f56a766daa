"""The columns of a ring record: what each number is, and how it is computed with.

A column is declared once, in the module of its family. The probe's kernels fill it under its name,
the ring stores it as a float64, the merge applies its algebra. NaN means "not observed": in the
ring, on the wire and in tables. Where values go by name, an absent one is not there; no exporter
ever sees NaN.

`FAMILIES` declares the tables: each family has one row per share in the record of a step, and one
row per layer in the table of a sampled step. Ring, merge, reports, flight records and series follow
the declaration.
"""

from collections.abc import Iterable, Mapping
from math import isnan

from mp_agent.records.columns.column import Column, ColumnFamily, Tier, Unscaling
from mp_agent.records.columns.gradients import (
    FEW_WEIGHTS,
    GRADIENT_COLUMNS,
    GRADIENTS,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    shows_reduction,
)
from mp_agent.records.columns.instruments import (
    ACTIVATIONS,
    ATTENTION,
    DELTA_EDGES,
    DISTRIBUTION,
    EXPONENTS,
    FP8,
    LOGITS,
    LOGPROBS,
    ROUTERS,
    TENSOR_EXPONENTS,
    TENSORS,
    delta_column,
    exponent_column,
)
from mp_agent.records.columns.step import (
    ACCUMULATION_BYPASSED,
    ANOTHER_MODEL,
    AUTOCAST_FP32_SHARE,
    BACKWARDS_DISCARDED,
    BATCH_DIGEST,
    BATCH_INTERVAL_STEPS,
    BATCH_KEPT,
    BATCH_LOADED,
    BATCH_NORM_MOMENTUM,
    BATCH_ROWS,
    BETAS_SWAPPED,
    CLIPPED_APART,
    CLIPPED_BY_SHARD,
    CLIPS_NOTHING,
    CUT_OFF_PARAMETERS,
    EPOCH_REPEATED,
    EVALUATED_IN_TRAINING,
    FP16_WITHOUT_LOSS_SCALE,
    GRADIENT_FACTOR,
    GRADIENTS_ADD_UP,
    GRADIENTS_REPLACED,
    GUARD_COLUMNS,
    LATE_CLIPPING,
    LEARNING_RATES_ZERO,
    LEFT_IN_EVALUATION,
    LOADED_BY_WORKERS,
    LOCAL_GRAD_NONFINITE_BACKWARD,
    LOCAL_GRAD_NONFINITE_ELEMENTS,
    LOCAL_GRAD_NORM,
    LOSS_FACTOR,
    LOSS_IN_16_BITS,
    LOSS_INPUT_MISMATCH,
    LOWEST_LEARNING_RATE,
    NOTHING_LOADED,
    OPTIMIZER_NEVER_STEPS,
    PADDING_IN_TARGETS,
    PARTED_PARAMETERS,
    RESUMED_WITHOUT_STATE,
    ROUNDED_RATIO,
    ROUNDING_LOSS,
    SCHEDULE_BEHIND,
    SEED_REPEATED,
    STEP_COLUMNS,
    STEP_REPEATED,
    STEP_SCALED,
    TARGETS_BROADCAST,
    TARGETS_MISALIGNED,
    TARGETS_SEEN,
    UNCHANGED_PARAMETERS,
    UNHELD_PARAMETERS,
    step_columns,
)

__all__ = [
    "ACCUMULATION_BYPASSED",
    "ACTIVATIONS",
    "ANOTHER_MODEL",
    "ATTENTION",
    "AUTOCAST_FP32_SHARE",
    "BACKWARDS_DISCARDED",
    "BATCH_DIGEST",
    "BATCH_INTERVAL_STEPS",
    "BATCH_KEPT",
    "BATCH_LOADED",
    "BATCH_NORM_MOMENTUM",
    "BATCH_ROWS",
    "BETAS_SWAPPED",
    "CLIPPED_APART",
    "CLIPPED_BY_SHARD",
    "CLIPS_NOTHING",
    "COLUMNS",
    "CUT_OFF_PARAMETERS",
    "DELTA_EDGES",
    "DISTRIBUTION",
    "EPOCH_REPEATED",
    "EVALUATED_IN_TRAINING",
    "EXPONENTS",
    "FAMILIES",
    "FEW_WEIGHTS",
    "FP8",
    "FP16_WITHOUT_LOSS_SCALE",
    "GRADIENTS",
    "GRADIENTS_ADD_UP",
    "GRADIENTS_REPLACED",
    "GRADIENT_COLUMNS",
    "GRADIENT_COLUMN_NAMES",
    "GRADIENT_FACTOR",
    "GRADIENT_POSITIONS",
    "GUARD_COLUMNS",
    "LATE_CLIPPING",
    "LEARNING_RATES_ZERO",
    "LEFT_IN_EVALUATION",
    "LOADED_BY_WORKERS",
    "LOCAL_GRAD_NONFINITE_BACKWARD",
    "LOCAL_GRAD_NONFINITE_ELEMENTS",
    "LOCAL_GRAD_NORM",
    "LOGITS",
    "LOGPROBS",
    "LOSS_FACTOR",
    "LOSS_INPUT_MISMATCH",
    "LOSS_IN_16_BITS",
    "LOWEST_LEARNING_RATE",
    "NOTHING_LOADED",
    "OPTIMIZER",
    "OPTIMIZER_NEVER_STEPS",
    "PADDING_IN_TARGETS",
    "PARTED_PARAMETERS",
    "RESUMED_WITHOUT_STATE",
    "ROUNDED_RATIO",
    "ROUNDING_LOSS",
    "ROUTERS",
    "SCHEDULE_BEHIND",
    "SEED_REPEATED",
    "STATE",
    "STEP_COLUMNS",
    "STEP_COLUMNS_BY_NAME",
    "STEP_COLUMN_NAMES",
    "STEP_REPEATED",
    "STEP_SCALED",
    "TARGETS_BROADCAST",
    "TARGETS_MISALIGNED",
    "TARGETS_SEEN",
    "TENSORS",
    "TENSOR_EXPONENTS",
    "UNCHANGED_PARAMETERS",
    "UNHELD_PARAMETERS",
    "WEIGHTS",
    "Column",
    "ColumnFamily",
    "Tier",
    "Unscaling",
    "by_name",
    "delta_column",
    "exponent_column",
    "shows_reduction",
    "step_columns",
]

FAMILIES: tuple[ColumnFamily, ...] = (
    GRADIENTS,
    OPTIMIZER,
    DISTRIBUTION,
    ACTIVATIONS,
    ATTENTION,
    LOGITS,
    ROUTERS,
    FP8,
    LOGPROBS,
    TENSORS,
    WEIGHTS,
    FEW_WEIGHTS,
    STATE,
)
"""All of them. When there are too many series, the layers of the last family give way first."""

STEP_COLUMN_NAMES = tuple(column.name for column in STEP_COLUMNS)
GRADIENT_COLUMN_NAMES = GRADIENTS.names

GRADIENT_POSITIONS: Mapping[str, int] = {
    name: position for position, name in enumerate(GRADIENT_COLUMN_NAMES)
}
"""Where a column is in the rows that the probe writes and the merge holds."""

STEP_COLUMNS_BY_NAME: Mapping[str, Column] = {column.name: column for column in STEP_COLUMNS}
"""The columns of a step as a whole by name."""

COLUMNS: Mapping[str, Column] = {
    column.name: column for column in (*STEP_COLUMNS, *GRADIENT_COLUMNS)
}
"""Those and the columns of the gradients by name; other families may use the same names."""


def by_name(names: Iterable[str], values: Iterable[float]) -> dict[str, float]:
    """Return the values that were observed, by name."""
    return {name: value for name, value in zip(names, values, strict=True) if not isnan(value)}
