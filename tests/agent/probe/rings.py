"""Rings for probe tests, and what was written to them, by column name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import numpy as np

from mp_agent.node.merge import RankStep, merge_step
from mp_agent.node.merge_layers import MergedLayers, RankLayers, merge_layers
from mp_agent.node.shares import AssumedShares, make_roster
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import LayerTable, RankState, StepRecord
from mp_agent.ring.reader import RingReader


def make_identity(rank: int = 0, world_size: int = 1) -> RankIdentity:
    return RankIdentity(
        run="test",
        attempt=0,
        launch="launch",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
        host="host",
        pid=1,
        created_unix_ns=1,
        torch_version="",
        version="",
    )


@dataclass(frozen=True)
class RingContents:
    schema: Schema
    records: Sequence[StepRecord]
    layers: Sequence[LayerTable]
    open_record: StepRecord | None
    state: RankState

    def values(self, index: int) -> Mapping[str, float]:
        """The observed step columns of one record."""
        pairs = zip(self.schema.step_columns, self.records[index].values.tolist(), strict=True)
        return {name: value for name, value in pairs if not isnan(value)}

    def gradients(self, index: int, share: int = 0) -> Mapping[str, float]:
        """The gradient columns of one record's share."""
        row = self.records[index].gradients[share].tolist()
        return dict(zip(self.schema.gradient_columns, row, strict=True))

    def column(self, name: str) -> list[float]:
        index = self.schema.step_columns.index(name)
        return [float(record.values[index]) for record in self.records]


def read_ring(path: Path) -> RingContents:
    """Read everything; several bodies must have equal schemas, else they are read by hand."""
    reader = RingReader.open(path)
    try:
        schema = reader.schema
        assert schema is not None, "the probe wrote no schema"
        records: list[StepRecord] = []
        layers: list[LayerTable] = []
        current = None
        while (following := reader.schema) is not current:
            assert following == schema, "there is a second schema"
            current = following
            position = records[-1].sequence if records else 0
            steps, lost = reader.steps_after(position)
            assert lost == 0
            layers += reader.layers_after(position)
            records += steps
        return RingContents(schema, records, layers, reader.open_record(), reader.state)
    finally:
        reader.close()


def merge_rings(rings: Mapping[int, RingContents]) -> list[MergedStep]:
    """Merge the records of all ranks as the node agent does."""
    roster = make_roster(len(rings), {rank: ring.schema for rank, ring in rings.items()})
    assumed = AssumedShares()
    steps = zip(*(ring.records for ring in rings.values()), strict=True)
    return [
        merge_step(
            [
                RankStep(rank=rank, schema=ring.schema, record=record)
                for (rank, ring), record in zip(rings.items(), records, strict=True)
            ],
            roster,
            assumed,
        )
        for records in steps
    ]


def merge_layer_tables(rings: Mapping[int, RingContents]) -> dict[int, MergedLayers]:
    """Merge the layer tables of the steps that all ranks looked at, by sequence.

    Of sharded gradients trouble may show on some ranks alone, which then look by themselves.
    """
    roster = make_roster(len(rings), {rank: ring.schema for rank, ring in rings.items()})
    found: dict[int, list[RankLayers]] = {}
    for rank, ring in rings.items():
        for table in ring.layers:
            found.setdefault(table.sequence, []).append(
                RankLayers(rank=rank, schema=ring.schema, rows=table.rows)
            )
    return {
        sequence: merge_layers(tables, roster, AssumedShares())
        for sequence, tables in found.items()
        if len(tables) == len(rings)
    }


def rows_by_name(merged: MergedLayers) -> dict[str, np.ndarray]:
    return dict(zip(merged.names, merged.values, strict=True))
