"""The rows that a node's ranks wrote of one step become the node's row of that step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan
from zlib import crc32

import numpy as np

from mp_agent.node.merge.schema_index import Indices, SchemaIndex, SchemaMapping, SharePlace
from mp_agent.records.columns import (
    BATCH_DIGEST,
    BATCH_ROWS,
    LOCAL_GRAD_NONFINITE_BACKWARD,
    STEP_COLUMNS_BY_NAME,
    ColumnFamily,
)
from mp_agent.records.node_report import (
    BatchSample,
    NodeRow,
    NodeStep,
    OwnNonfinite,
    StepValue,
    WeightSample,
)
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray, StepRecord

_NANOSECONDS = 1e9
_ABSENT = StepValue(count=0, value=nan)


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's record of a step, with the schema that was in force when it was written."""

    rank: int
    schema: Schema
    record: StepRecord


@dataclass(frozen=True, slots=True)
class _Row:
    """The row of one shard on one rank."""

    rank: int
    values: list[float]
    bits: bytes


def reduce_step(
    steps: Sequence[RankStep], schema_index: SchemaIndex, holding: int | None = None
) -> NodeStep:
    """Return what the records of a node's ranks say together.

    Shards are added up per replica, equal replicas become one row, rows that no rank observed are
    left out. holding: what all ranks of the node held, `schema_index.holding` of their schemas;
    None: what these ranks held.
    """
    steps = sorted(steps, key=lambda step: step.rank)
    plans = [schema_index.plan(step.schema) for step in steps]
    values = [step.record.values.tolist() for step in steps]
    losses = _own(values, plans, "loss_nonfinite")
    if holding is None:
        holding = schema_index.holding([step.schema for step in steps])
    measured = {name for step in steps for name in step.record.families}
    return NodeStep(
        sequence=steps[0].record.sequence,
        step=_trainer_step(steps),
        time_unix_seconds=max(step.record.time_unix_ns for step in steps) / _NANOSECONDS,
        ranks=tuple(step.rank for step in steps),
        holding=holding,
        values=_step_values(values, plans, schema_index),
        rows=tuple(
            row
            for number, family in enumerate(schema_index.families)
            if family.name in measured
            for row in _rows(number, family, steps, plans, schema_index)
        ),
        compute_seconds=tuple(_own(values, plans, "compute_seconds")),
        nonfinite_loss_ranks=tuple(
            step.rank for step, loss in zip(steps, losses, strict=True) if loss == 1.0
        ),
        nonfinite_gradients=_nonfinite_gradients(
            steps, _own(values, plans, LOCAL_GRAD_NONFINITE_BACKWARD)
        ),
        samples=_samples(steps, plans, _own(values, plans, "weight_sample")),
        batches=_batches(steps, plans, _own(values, plans, BATCH_DIGEST)),
        losses=_observed_by_any(_own(values, plans, "loss")),
        batch_rows=_observed_by_any(_own(values, plans, BATCH_ROWS)),
    )


def observed_columns(schema: Schema, record: StepRecord) -> dict[str, float]:
    """Return a record's finite step columns by name."""
    pairs = zip(schema.step_columns, record.values.tolist(), strict=True)
    return {name: value for name, value in pairs if isfinite(value)}


def _step_values(
    values: Sequence[list[float]], plans: Sequence[SchemaMapping], schema_index: SchemaIndex
) -> tuple[StepValue, ...]:
    columns = len(schema_index.step_columns)
    ranks = [
        [own[index] if index >= 0 else nan for index in plan.step_columns[:columns]]
        for plan, own in zip(plans, values, strict=True)
    ]
    return tuple(
        _ABSENT
        if all(map(isnan, column))
        else StepValue(
            count=sum(not isnan(value) for value in column),
            value=STEP_COLUMNS_BY_NAME[name].algebra.merged(column),
        )
        for name, column in zip(schema_index.step_columns, zip(*ranks, strict=True), strict=True)
    )


def _rows(
    number: int,
    family: ColumnFamily,
    steps: Sequence[RankStep],
    plans: Sequence[SchemaMapping],
    schema_index: SchemaIndex,
) -> Iterator[NodeRow]:
    """Yield one row of a family per share and distinct content, those of the lowest ranks first."""
    assumed: dict[tuple[int, bytes], list[_Row]] = {}
    replicas: dict[tuple[int, int], dict[int, _Row]] = {}
    for place, row in _observed(family, steps, plans):
        if place.assumed:
            assumed.setdefault((place.share, row.bits), []).append(row)
        else:
            replicas.setdefault((place.share, place.replica), {}).setdefault(place.shard, row)
    for (share, _), alike in assumed.items():
        yield NodeRow(
            family=number,
            share=share,
            shards=(0,),
            replicas=(0,),
            ranks=tuple(row.rank for row in alike),
            columns=_columns(alike[:1], family),
        )
    yield from _replica_rows(number, family, replicas, schema_index)


def _replica_rows(
    number: int,
    family: ColumnFamily,
    replicas: Mapping[tuple[int, int], Mapping[int, _Row]],
    schema_index: SchemaIndex,
) -> Iterator[NodeRow]:
    alike: dict[tuple[int, tuple[tuple[int, bytes], ...]], dict[int, Mapping[int, _Row]]] = {}
    for (share, replica), rows in replicas.items():
        content = tuple((shard, rows[shard].bits) for shard in sorted(rows))
        alike.setdefault((share, content), {})[replica] = rows
    for (share, content), equal in alike.items():
        shards = [shard for shard, _ in content]
        chosen = sorted(equal)
        first = [equal[chosen[0]][shard] for shard in shards]
        compared = family.compares_replicas and schema_index.shares[share].replica_count > 1
        yield NodeRow(
            family=number,
            share=share,
            shards=tuple(shards),
            replicas=tuple(chosen),
            ranks=tuple(equal[replica][shard].rank for replica in chosen for shard in shards),
            columns=_columns(first, family),
            digests=_row_digests(first, family) if compared else (),
        )


def _observed(
    family: ColumnFamily, steps: Sequence[RankStep], plans: Sequence[SchemaMapping]
) -> Iterator[tuple[SharePlace, _Row]]:
    """Yield the rows of a family in which anything was observed, rank by rank."""
    measured = [
        (step.rank, plan, fitted(rows, plan.families[family.name]))
        for step, plan in zip(steps, plans, strict=True)
        if (rows := step.record.families.get(family.name)) is not None
        and family.name in plan.families
    ]
    if not measured:
        return
    ranks = [rank for rank, plan, _ in measured for _ in plan.places]
    places = [place for _, plan, _ in measured for place in plan.places]
    of_family = np.concatenate([plan.has_rows[family.name] for _, plan, _ in measured])
    # Adding 0 makes -0.0 and 0.0, which are equal, the same bits.
    rows = 0.0 + np.concatenate([rows for _, _, rows in measured])
    absent = np.isnan(rows)
    rows[absent] = nan  # the same bits for all
    observed = np.flatnonzero(~absent.all(axis=1) & of_family)
    bits, size = rows.tobytes(), rows.shape[1] * rows.itemsize
    for index, values in zip(observed.tolist(), rows[observed].tolist(), strict=True):
        own = bits[index * size : (index + 1) * size]
        yield places[index], _Row(ranks[index], values, own)


def fitted(rows: FloatArray, places: Indices | None) -> FloatArray:
    """Return rows [N, C] with the index's columns, at these places; NaN in absent ones."""
    if places is None:
        return rows
    absent = np.full((len(rows), 1), np.nan)
    return np.concatenate([rows, absent], axis=1)[:, places]


def _columns(rows: Sequence[_Row], family: ColumnFamily) -> tuple[float, ...]:
    """Return each column of some shards together."""
    columns = zip(*(row.values for row in rows), strict=True)
    return tuple(
        own.algebra.merged(column) for own, column in zip(family.columns, columns, strict=True)
    )


def _row_digests(rows: Sequence[_Row], family: ColumnFamily) -> tuple[int, ...]:
    """Return what replicas must have in common: every bit, or the counts where not all is finite.

    Replicas may differ in a sum over the finite elements where there is a NaN.
    """
    nonfinite = [family.names.index(name) for name in family.nonfinite]
    counts = [*nonfinite, family.names.index(family.size)]
    return tuple(
        crc32(repr(tuple(row.values[place] for place in counts)).encode())
        if any(row.values[place] > 0 for place in nonfinite)
        else crc32(row.bits)
        for row in rows
    )


def _nonfinite_gradients(
    steps: Sequence[RankStep], backwards: Sequence[float]
) -> OwnNonfinite | None:
    """Return whose own gradients were not finite first: a later backward adds to reduced ones."""
    first = min((each for each in backwards if each >= 1.0), default=None)
    if first is None:
        return None
    pairs = zip(steps, backwards, strict=True)
    return OwnNonfinite(
        backward=int(first), ranks=tuple(step.rank for step, own in pairs if own == first)
    )


def _samples(
    steps: Sequence[RankStep], plans: Sequence[SchemaMapping], samples: Sequence[float]
) -> tuple[WeightSample, ...]:
    alike: dict[tuple[str, float], list[int]] = {}
    for step, plan, sample in zip(steps, plans, samples, strict=True):
        if plan.weights and isfinite(sample):
            alike.setdefault((plan.weights, sample), []).append(step.rank)
    return tuple(
        WeightSample(of=weights, digest=sample, ranks=tuple(ranks))
        for (weights, sample), ranks in alike.items()
    )


def _batches(
    steps: Sequence[RankStep], plans: Sequence[SchemaMapping], digests: Sequence[float]
) -> tuple[BatchSample, ...]:
    alike: dict[tuple[str, float], list[int]] = {}
    for step, plan, digest in zip(steps, plans, digests, strict=True):
        if isfinite(digest):
            alike.setdefault((plan.data_ranks, digest), []).append(step.rank)
    return tuple(
        BatchSample(of=of, digest=digest, ranks=tuple(ranks))
        for (of, digest), ranks in alike.items()
    )


def _observed_by_any(values: Sequence[float]) -> tuple[float, ...]:
    return () if all(map(isnan, values)) else tuple(values)


def _own(values: Sequence[list[float]], plans: Sequence[SchemaMapping], name: str) -> list[float]:
    """Return one step column of each rank; NaN when not observed, or unknown to its schema."""
    places = [plan.own_columns.get(name) for plan in plans]
    return [nan if at is None else own[at] for own, at in zip(values, places, strict=True)]


def _trainer_step(steps: Sequence[RankStep]) -> int:
    """Return the trainer's own step if any rank knows it, else the count since attach."""
    known = (step.record.step for step in steps if step.record.step != step.record.sequence)
    return next(known, steps[0].record.step)
