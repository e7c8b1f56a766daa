"""Records that carry their own redundancy: every number follows from the sequence number."""

import os
from collections.abc import Mapping

import numpy as np

from mp_agent.records.schema import FamilyColumns, Layer, RankIdentity, Schema, Share
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
        families=(
            FamilyColumns("gradients", tuple(f"gradient{index}" for index in range(columns))),
            FamilyColumns("weights", ("weight0", "weight1")),
        ),
        shares=tuple(Share(group=f"group{index}") for index in range(shares)),
        layers=tuple(
            Layer(name=f"layer{index}", share=index % max(1, shares), elements=index)
            for index in range(layers)
        ),
        facts=(("strategy", "ddp"),),
    )


def step_record(schema: Schema, sequence: int) -> StepRecord:
    return StepRecord(
        sequence=sequence,
        step=sequence * 3,
        time_unix_ns=sequence * 5,
        values=sequence + np.arange(len(schema.step_columns)) / 64,
        families=_families(schema, sequence, len(schema.shares)),
    )


def layer_table(schema: Schema, sequence: int) -> LayerTable:
    return LayerTable(sequence=sequence, families=_families(schema, sequence, len(schema.layers)))


def _families(schema: Schema, sequence: int, rows: int) -> dict[str, np.ndarray]:
    """Return rows of every family; those of weights on every other step."""
    shapes = {family.name: (rows, len(family.columns)) for family in schema.families}
    return {
        name: sequence + number + np.arange(shape[0] * shape[1]).reshape(shape) / 64
        for number, (name, shape) in enumerate(shapes.items())
        if name == "gradients" or sequence % 2
    }


def same_step(one: StepRecord, other: StepRecord) -> bool:
    """Whether two records are equal, bit for bit."""
    return (
        (one.sequence, one.step, one.time_unix_ns)
        == (other.sequence, other.step, other.time_unix_ns)
        and one.values.tobytes() == other.values.tobytes()
        and _same_families(one.families, other.families)
    )


def same_layers(one: LayerTable, other: LayerTable) -> bool:
    """Whether two layer tables are equal, bit for bit."""
    return one.sequence == other.sequence and _same_families(one.families, other.families)


def _same_families(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        (rows.shape, rows.tobytes()) == (other[name].shape, other[name].tobytes())
        for name, rows in one.items()
    )
