"""Records that carry their own redundancy: every number follows from the sequence number."""

import os

import numpy as np

from mp_agent.records.schema import Layer, RankIdentity, Schema, Share
from mp_agent.records.steps import LayerTable, StepRecord


def identity(*, rank: int = 0, **changes: object) -> RankIdentity:
    fields: dict[str, object] = {
        "run": "a run",
        "attempt": 0,
        "launch": "launch",
        "rank": rank,
        "world_size": 4,
        "local_rank": rank,
        "local_world_size": 4,
        "node_rank": 0,
        "host": "host",
        "pid": os.getpid(),
        "created_unix_ns": 1_700_000_000_000_000_000,
        "torch_version": "2.13.0",
        "version": "0.1.0",
    }
    return RankIdentity(**{**fields, **changes})  # type: ignore[arg-type]


def schema(*, shares: int = 2, layers: int = 5, columns: int = 3) -> Schema:
    return Schema(
        step_columns=tuple(f"step{index}" for index in range(columns)),
        gradient_columns=tuple(f"gradient{index}" for index in range(columns)),
        shares=tuple(Share(group=f"group{index}") for index in range(shares)),
        layers=tuple(
            Layer(name=f"layer{index}", share=index % max(1, shares), elements=index)
            for index in range(layers)
        ),
        facts=(("strategy", "ddp"),),
    )


def step_record(schema: Schema, sequence: int) -> StepRecord:
    columns, gradient_columns = len(schema.step_columns), len(schema.gradient_columns)
    shape = (len(schema.shares), gradient_columns)
    return StepRecord(
        sequence=sequence,
        step=sequence * 3,
        time_unix_ns=sequence * 5,
        values=sequence + np.arange(columns) / 64,
        gradients=sequence + np.arange(shape[0] * shape[1]).reshape(shape) / 64,
    )


def layer_table(schema: Schema, sequence: int) -> LayerTable:
    shape = (len(schema.layers), len(schema.gradient_columns))
    rows = sequence + np.arange(shape[0] * shape[1]).reshape(shape) / 64
    return LayerTable(sequence=sequence, rows=rows)


def same_step(one: StepRecord, other: StepRecord) -> bool:
    """Whether two records are equal, bit for bit."""
    return (
        (one.sequence, one.step, one.time_unix_ns)
        == (other.sequence, other.step, other.time_unix_ns)
        and one.values.tobytes() == other.values.tobytes()
        and one.gradients.tobytes() == other.gradients.tobytes()
        and one.gradients.shape == other.gradients.shape
    )


def same_layers(one: LayerTable, other: LayerTable) -> bool:
    """Whether two layer tables are equal, bit for bit."""
    return (one.sequence, one.rows.shape, one.rows.tobytes()) == (
        other.sequence,
        other.rows.shape,
        other.rows.tobytes(),
    )
