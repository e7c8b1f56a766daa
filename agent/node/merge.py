"""The rows of several ranks become one step of the run, by the columns' algebra and shares."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, isnan

import numpy as np

from mp_agent.node.shares import AssumedShares, BlockKey, Roster
from mp_agent.records.columns import GRADIENT_COLUMNS, STEP_COLUMNS, Algebra
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import Schema, Share
from mp_agent.records.steps import FloatArray, StepRecord

_NANOSECONDS = 1e9

ALGEBRA = {column.name: column.algebra for column in (*STEP_COLUMNS, *GRADIENT_COLUMNS)}


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's record of a step, with the schema that was in force when it was written."""

    rank: int
    schema: Schema
    record: StepRecord


def merge_step(steps: Sequence[RankStep], roster: Roster, assumed: AssumedShares) -> MergedStep:
    """Return the step that the ranks' records make together.

    Of equal replicas one is taken, shards add up; a column that no rank observed, or whose merged
    value is beyond float64, is absent. `assumed` learns from the rows before they are merged.
    """
    steps = sorted(steps, key=lambda step: step.rank)
    if assumed_rows := [pair for pair in _share_rows(steps) if pair[0].assumed]:
        assumed.observe(assumed_rows)
    blocks = _select_blocks(steps, assumed)
    merged = {**_merge_step_columns(steps), **_merge_gradients(steps[0].schema, blocks)}
    return MergedStep(
        sequence=steps[0].record.sequence,
        step=_trainer_step(steps),
        time_unix_seconds=max(step.record.time_unix_ns for step in steps) / _NANOSECONDS,
        values={name: value for name, value in merged.items() if isfinite(value)},
        world_size=roster.world_size,
        present_ranks=frozenset(step.rank for step in steps),
        gradients_complete=roster.complete(blocks, assumed),
        nonfinite_loss_ranks=tuple(
            step.rank for step in steps if _column(step, "loss_nonfinite") == 1.0
        ),
    )


def observed_columns(schema: Schema, record: StepRecord) -> Mapping[str, float]:
    """Return a record's finite step columns by name."""
    pairs = zip(schema.step_columns, record.values.tolist(), strict=True)
    return {name: value for name, value in pairs if isfinite(value)}


def _share_rows(steps: Sequence[RankStep]) -> Iterator[tuple[Share, FloatArray]]:
    for step in steps:
        yield from zip(step.schema.shares, step.record.gradients, strict=True)


def _select_blocks(steps: Sequence[RankStep], assumed: AssumedShares) -> dict[BlockKey, FloatArray]:
    """Return one observed row [C] per block: that of the lowest rank that has one."""
    blocks: dict[BlockKey, FloatArray] = {}
    for step in steps:
        for share, row in zip(step.schema.shares, step.record.gradients, strict=True):
            key = assumed.key(share, step.rank)
            if key not in blocks and not np.isnan(row).any():
                blocks[key] = row
    return blocks


def _merge_gradients(schema: Schema, blocks: Mapping[BlockKey, FloatArray]) -> dict[str, float]:
    if not blocks:
        return {}
    columns = np.stack(list(blocks.values())).T.tolist()
    return {
        name: _combine(ALGEBRA[name], values)
        for name, values in zip(schema.gradient_columns, columns, strict=True)
        if name in ALGEBRA
    }


def _merge_step_columns(steps: Sequence[RankStep]) -> dict[str, float]:
    observed: dict[str, list[float]] = {}
    for step in steps:
        for name, value in zip(step.schema.step_columns, step.record.values.tolist(), strict=True):
            if not isnan(value) and ALGEBRA.get(name, Algebra.OWN) is not Algebra.OWN:
                observed.setdefault(name, []).append(value)
    return {name: _combine(ALGEBRA[name], values) for name, values in observed.items()}


def _combine(algebra: Algebra, values: Sequence[float]) -> float:
    try:
        if algebra is Algebra.SUM:
            return fsum(values)
        if algebra is Algebra.MEAN:
            return fsum(values) / len(values)
    except OverflowError:
        return float("inf")
    return min(values) if algebra is Algebra.MIN else max(values)


def _column(step: RankStep, name: str) -> float | None:
    """Return one step column of a rank, or None when its schema does not have it."""
    columns = step.schema.step_columns
    return float(step.record.values[columns.index(name)]) if name in columns else None


def _trainer_step(steps: Sequence[RankStep]) -> int:
    """Return the trainer's own step if any rank was told it, else the count since attach."""
    told = (step.record.step for step in steps if step.record.step != step.record.sequence)
    return next(told, steps[0].record.step)
