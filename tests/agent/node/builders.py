"""Records, schemas and identities for tests, given by what matters in them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mp_agent.node.accounting.accumulator import CounterStore
from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.columns import (
    GRADIENT_COLUMN_NAMES,
    GRADIENTS,
    STEP_COLUMNS_BY_NAME,
    step_columns,
)
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import Layer, RankIdentity, Schema, Share, family_columns
from mp_agent.records.steps import EndReason, FloatArray, LayerTable, Phase, RankState, StepRecord
from mp_agent.records.views import AgentView, RunView

STEP_COLUMNS = step_columns(guarded=False)
NO_GRADIENTS = dict.fromkeys(GRADIENT_COLUMN_NAMES, 0.0)


def make_identity(rank: int = 0, **changes: Any) -> RankIdentity:
    world_size = changes.pop("world_size", 1)
    facts: dict[str, Any] = {
        "run": "llama",
        "attempt": 0,
        "launch": "launcher",
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "local_world_size": world_size,
        "node_rank": 0,
        "host": "host",
        "pid": 1,
        "created_unix_ns": 1_000 + rank,
        "torch_version": "2.13.0",
        "version": "0.1.0",
    }
    return RankIdentity(**{**facts, **changes})


def make_schema(*shares: Share, layers: tuple[str, ...] = ("weight",), **facts: str) -> Schema:
    shares = shares or (Share(group="all"),)
    return Schema(
        step_columns=STEP_COLUMNS,
        families=family_columns((GRADIENTS,)),
        shares=shares,
        layers=tuple(
            Layer(name=name, share=index % len(shares), elements=4)
            for index, name in enumerate(layers)
        ),
        facts=tuple(facts.items()),
    )


def gradient_row(**columns: float) -> FloatArray:
    """Return a row [C]; columns that are not named are 0."""
    return np.array([{**NO_GRADIENTS, **columns}[name] for name in GRADIENT_COLUMN_NAMES])


def make_record(
    sequence: int = 1,
    values: Mapping[str, float] | None = None,
    gradients: list[FloatArray] | None = None,
    *,
    step: int | None = None,
    time_unix_seconds: float = 100.0,
) -> StepRecord:
    """Return a record; step columns that are not named are absent."""
    columns = {**dict.fromkeys(STEP_COLUMNS, float("nan")), **(values or {})}
    return StepRecord(
        sequence=sequence,
        step=sequence if step is None else step,
        time_unix_ns=round(time_unix_seconds * 1e9),
        values=np.array([columns[name] for name in STEP_COLUMNS]),
        families={
            GRADIENTS.name: np.stack(gradients or [gradient_row(elements=4.0, sum_squares=1.0)])
        },
    )


def rank_layers(rank: int, schema: Schema, rows: FloatArray) -> RankLayers:
    """Return a rank's table of its layers' gradients [L, C]."""
    return RankLayers(rank, schema, {GRADIENTS.name: rows})


def layer_table(sequence: int, rows: FloatArray) -> LayerTable:
    """Return a table of layers' gradients [L, C]."""
    return LayerTable(sequence=sequence, families={GRADIENTS.name: rows})


def rank_step(rank: int, record: StepRecord, *shares: Share) -> RankStep:
    return RankStep(rank, make_schema(*shares), record)


def guarded_step(step: RankStep, **actions: float) -> RankStep:
    """Return the step as a rank with a guard writes it; actions: values of columns of its own."""
    columns = step_columns(guarded=True)
    values = {**dict(zip(step.schema.step_columns, step.record.values, strict=True)), **actions}
    record = replace(
        step.record, values=np.array([values.get(name, float("nan")) for name in columns])
    )
    return RankStep(step.rank, replace(step.schema, step_columns=columns), record)


def step_with_local_gradients(step: RankStep, **values: float) -> RankStep:
    """Return the step as a rank writes it that measures gradients before they are reduced."""
    columns = step_columns(guarded=False, local_gradients=True)
    own = {**dict(zip(step.schema.step_columns, step.record.values, strict=True)), **values}
    record = replace(
        step.record, values=np.array([own.get(name, float("nan")) for name in columns])
    )
    return RankStep(step.rank, replace(step.schema, step_columns=columns), record)


def merged_step(sequence: int = 1, **values: float) -> MergedStep:
    """Return a complete step of a world of one; `norm` stands for the sum of squares."""
    if "norm" in values:
        values["sum_squares"] = values.pop("norm") ** 2
    return MergedStep(
        sequence=sequence,
        step=sequence,
        time_unix_seconds=values.pop("time", 1_000.0 + sequence),
        columns={name: value for name, value in values.items() if name in STEP_COLUMNS_BY_NAME},
        families={
            GRADIENTS.name: {n: value for n, value in values.items() if n in GRADIENT_COLUMN_NAMES}
        },
        complete=frozenset({GRADIENTS.name}),
        world_size=1,
        present_ranks=frozenset({0}),
        nonfinite_loss_ranks=(0,) if values.get("loss_nonfinite") else (),
    )


def make_state(phase: Phase = Phase.FORWARD, **changes: Any) -> RankState:
    facts: dict[str, Any] = {
        "phase": phase,
        "phase_name": phase.name.lower(),
        "phase_unix_ns": 0,
        "started_sequence": 0,
        "committed_sequence": 0,
        "end_reason": EndReason.RUNNING,
        "scrape_wait": False,
        "probe_errors": 0,
        "setting_errors": 0,
        "records_dropped": 0,
        "probe_seconds": 0.0,
    }
    return RankState(**{**facts, **changes})


def make_run_view(**changes: Any) -> RunView:
    """Return the view of a run of one rank that is active."""
    facts: dict[str, Any] = {
        "identity": make_identity(),
        "facts": {},
        "nodes": 1,
        "active": True,
        "end_reason": EndReason.RUNNING,
        "phase_name": "forward",
    }
    return RunView(**{**facts, **changes})


def make_agent_view(**changes: Any) -> AgentView:
    """Return the account of a node agent that has lost nothing."""
    facts: dict[str, Any] = {
        "version": "0.1.0",
        "probe_seconds": 0.0,
        "probe_errors": 0,
        "setting_errors": 0,
        "records_dropped": 0,
        "series_dropped": 0,
        "scrape_duration_seconds": None,
        "unsupported": (),
    }
    return AgentView(**{**facts, **changes})


def make_export(**changes: Any) -> RunExport:
    """Return what a run shows that has neither layers nor ranks yet."""
    facts: dict[str, Any] = {
        "run": "llama",
        "node_rank": 0,
        "view": make_run_view(),
        "layers": (),
        "ranks": (),
        "faded_ranks": frozenset(),
        "agent": make_agent_view(),
        "counters": CounterStore(),
    }
    return RunExport(**{**facts, **changes})
