"""Histories and records for tests, given by what matters in them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mp_agent.alerting.values import Values, values_in_force
from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.flight.postmortem.analysis import diagnose
from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.diagnosis import Diagnosis, LayerSample, RunHistory
from mp_agent.flight.record.evidence import Evidence, GpuError
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.flight.replay import judged_items
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENTS
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.flight import FlightRequest, NodeRecord, RankLog, Segment
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import Schema, Share
from mp_agent.records.steps import EndReason, Phase
from tests.agent.node.builders import (
    gradient_row,
    layer_table,
    make_identity,
    make_record,
    make_schema,
    make_state,
    merged_step,
)


def calm(count: int, *, first: int = 1, norm: float = 1.0, **values: float) -> list[MergedStep]:
    """Return ordinary steps, whose loss and norm vary a little."""
    wobble = (0.0, 0.02, -0.03, 0.01, -0.01)
    return [
        merged_step(
            sequence,
            **{"loss": 2.0 + wobble[sequence % 5], **values},
            norm=norm * (1.0 + wobble[sequence % 5]),
        )
        for sequence in range(first, first + count)
    ]


def overflow(sequence: int, scale: float, *, forward: bool = False) -> MergedStep:
    """Return a step that GradScaler skips."""
    values = {"loss_scale": scale, "skipped": 1.0, "inf_elements": 3.0}
    lost = {"loss_nonfinite": 1.0} if forward else {"loss": 2.0}
    return merged_step(sequence, norm=0.5, **values, **lost)


def layers(sequence: int, rows: Mapping[str, Mapping[str, float]]) -> LayerSample:
    """Return a table; columns that are not named are 0."""
    values = np.stack([gradient_row(**columns) for columns in rows.values()])
    return LayerSample(
        sequence=sequence,
        names=tuple(rows),
        columns=GRADIENT_COLUMN_NAMES,
        values=values,
        complete=True,
    )


def make_log(
    rank: int = 0,
    *,
    end: EndReason = EndReason.COMPLETED,
    phase: Phase = Phase.ENDED,
    segments: tuple[Segment, ...] = (),
    state: Mapping[str, Any] | None = None,
    **identity: Any,
) -> RankLog:
    return RankLog(
        identity=make_identity(rank, **identity),
        state=make_state(phase, **(state or {})),
        end=end,
        segments=segments,
    )


def findings_of(
    steps: Iterable[MergedStep],
    tables: Sequence[LayerSample] = (),
    *,
    ranks: Sequence[RankLog] = (),
    precision: str = "fp16",
    read_unix_seconds: float = 0.0,
    values: Values | None = None,
    gpu_errors: Sequence[GpuError] = (),
    conditions: Sequence[ActiveCondition] = (),
    **facts: str,
) -> dict[str, Diagnosis]:
    """Return what is found in a history, by cause."""
    schema = make_schema(layers=("weight",), precision=precision, **facts)
    logs = ranks or [make_log(segments=(Segment(schema=schema),))]
    evidence = Evidence(
        source=Path("record"),
        ranks=tuple(logs),
        read_unix_seconds=read_unix_seconds,
        values=values or values_in_force(),
        conditions=tuple(conditions),
        gpu_errors=tuple(gpu_errors),
    )
    history = history_of(steps, tables, evidence.values)
    return {finding.cause.name: finding for finding in diagnose(Case(evidence, history))}


def history_of(
    steps: Iterable[MergedStep], tables: Sequence[LayerSample], values: Values
) -> RunHistory:
    """Return what is judged of steps and samples of layers, each after its step."""
    samples = [MergedTable(table.sequence, {GRADIENTS.name: _merged(table)}) for table in tables]
    items: list[MergedStep | MergedTable] = [*steps, *samples]
    items.sort(key=lambda item: item.sequence)
    return judged_items(items, values, "llama")


def _merged(table: LayerSample) -> MergedLayers:
    return MergedLayers(
        names=table.names,
        family=GRADIENTS,
        values=table.values,
        sound=np.isfinite(table.values).all(axis=1) & (table.nonfinite == 0.0),
        complete=table.complete,
    )


def make_segment(
    steps: int = 3,
    *,
    first: int = 1,
    schema: Schema | None = None,
    tables: Sequence[int] = (),
    **values: float,
) -> Segment:
    schema = schema or make_schema(Share(group="ddp"), layers=("weight", "bias"), precision="fp16")
    rows = np.stack([gradient_row(elements=4.0, sum_squares=2.0) for _ in schema.layers])
    return Segment(
        schema=schema,
        steps=tuple(
            make_record(sequence, {"loss": 2.0, "step_seconds": 0.1, "skipped": 0.0, **values})
            for sequence in range(first, first + steps)
        ),
        tables=tuple(layer_table(sequence, rows) for sequence in tables),
    )


def make_node_record(*logs: RankLog, name: str = "20260221T000000.000Z-request") -> NodeRecord:
    logs = logs or (make_log(segments=(make_segment(tables=(1, 3)),)),)
    return NodeRecord(
        request=FlightRequest(
            name=name, reason="request", first=1, last=3, requested_unix_seconds=1.0
        ),
        run=logs[0].identity.run,
        node_rank=logs[0].identity.node_rank,
        host="host",
        written_unix_seconds=2.0,
        versions={"mp_agent": "0.1.0"},
        settings={"run": "llama"},
        thresholds=dict(DEFAULTS),
        ranks=logs,
    )


def renamed(record: NodeRecord, name: str) -> NodeRecord:
    return replace(record, request=replace(record.request, name=name))
