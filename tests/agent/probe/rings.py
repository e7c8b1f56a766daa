"""Rings for probe tests, and what was written to them, by column name."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TypeVar

import numpy as np

from mp_agent.node.merge.coverage import AssumedShares
from mp_agent.node.merge.node_layers import LayerNames, RankLayers
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import GRADIENTS, ColumnFamily, by_name
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import LayerTable, RankState, StepRecord
from mp_agent.ring.reader import RingReader
from tests.agent.node.nodes import merge_node_layers, merge_nodes

T = TypeVar("T")


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
    """schema: the last one; `record_schemas` and `layer_schemas`: those of each record, table."""

    schema: Schema
    records: Sequence[StepRecord]
    record_schemas: Sequence[Schema]
    layers: Sequence[LayerTable]
    layer_schemas: Sequence[Schema]
    open_record: StepRecord | None
    state: RankState

    def values(self, index: int) -> Mapping[str, float]:
        """The observed step columns of one record."""
        pairs = zip(self.schema.step_columns, self.records[index].values.tolist(), strict=True)
        return {name: value for name, value in pairs if not isnan(value)}

    def gradients(self, index: int, share: int = 0) -> Mapping[str, float]:
        """The gradient columns of one record's share."""
        row = self.records[index].gradients[share].tolist()
        return dict(zip(self.schema.columns("gradients"), row, strict=True))

    def rows(self, family: ColumnFamily) -> dict[int, dict[str, dict[str, float]]]:
        """The observed columns of a family, by step and by those layers that have any."""
        found = {}
        for table, schema in zip(self.layers, self.layer_schemas, strict=True):
            if family.name in table.families:
                rows = zip(schema.layers, table.families[family.name].tolist(), strict=True)
                named = {layer.name: by_name(family.names, row) for layer, row in rows}
                found[table.sequence] = {name: row for name, row in named.items() if row}
        return found

    def column(self, name: str) -> list[float]:
        index = self.schema.step_columns.index(name)
        return [float(record.values[index]) for record in self.records]


def read_ring(path: Path, *, one_schema: bool = True) -> RingContents:
    """Read everything, from all bodies; unless `one_schema` is False they must be alike."""
    reader = RingReader.open(path)
    try:
        schema = reader.schema
        assert schema is not None, "the probe wrote no schema"
        records: list[StepRecord] = []
        record_schemas: list[Schema] = []
        layers: list[LayerTable] = []
        layer_schemas: list[Schema] = []
        current = None
        while (following := reader.schema) is not current and following is not None:
            assert following == schema or not one_schema, "there is a second schema"
            current = schema = following
            steps, lost = reader.steps_after(records[-1].sequence if records else 0)
            assert lost == 0
            tables = reader.layers_after(layers[-1].sequence if layers else 0)
            records += steps
            record_schemas += [current] * len(steps)
            layers += tables
            layer_schemas += [current] * len(tables)
        return RingContents(
            schema,
            records,
            record_schemas,
            layers,
            layer_schemas,
            reader.open_record(),
            reader.state,
        )
    finally:
        reader.close()


def read_rings(directory: Path, ranks: int, *, one_schema: bool = True) -> dict[int, RingContents]:
    """Read `rank{N}.ring` of each rank."""
    return {
        rank: read_ring(directory / f"rank{rank}.ring", one_schema=one_schema)
        for rank in range(ranks)
    }


def rank_steps(rings: Mapping[int, RingContents], index: int) -> list[RankStep]:
    """The record at a place of each ring, with its own schema."""
    return [
        RankStep(rank=rank, schema=ring.record_schemas[index], record=ring.records[index])
        for rank, ring in rings.items()
    ]


def merge_rings(rings: Mapping[int, RingContents], *, nodes: int = 1) -> list[MergedStep]:
    """Merge the records of all ranks, as if they came from so many nodes."""
    return _merged(rings, AssumedShares(), nodes)


def _merged(
    rings: Mapping[int, RingContents], assumed: AssumedShares, nodes: int
) -> list[MergedStep]:
    merged = []
    for index in range(len(rings[0].records)):
        steps = rank_steps(rings, index)
        layers = [
            RankLayers(rank=rank, schema=schema, families=table.families)
            for rank, ring in rings.items()
            for table, schema in zip(ring.layers, ring.layer_schemas, strict=True)
            if table.sequence == steps[0].record.sequence
        ]
        merged.append(merge_nodes(_over(nodes, steps), len(rings), assumed=assumed, layers=layers))
    return merged


def merge_layer_tables(
    rings: Mapping[int, RingContents],
    *,
    nodes: int = 1,
    sequences: Collection[int] | None = None,
    family: str = GRADIENTS.name,
) -> dict[int, MergedLayers]:
    """Merge a family's layer tables of the steps that all ranks looked at, by sequence.

    Of sharded gradients trouble may show on some ranks alone, which then look by themselves.
    """
    found: dict[int, list[RankLayers]] = {}
    for rank, ring in rings.items():
        for table, schema in zip(ring.layers, ring.layer_schemas, strict=True):
            if family in table.families:
                found.setdefault(table.sequence, []).append(
                    RankLayers(rank=rank, schema=schema, families=table.families)
                )
    assumed, names = _judged(rings), LayerNames()
    return {
        sequence: merge_node_layers(
            _over(nodes, tables), len(rings), assumed=assumed, names=names, family=family
        )
        for sequence, tables in sorted(found.items())
        if len(tables) == len(rings) and (sequences is None or sequence in sequences)
    }


def _judged(rings: Mapping[int, RingContents]) -> AssumedShares:
    """What the merge has learned of plain parameters once it has seen all steps."""
    assumed = AssumedShares()
    _merged(rings, assumed, nodes=1)
    return assumed


def _over(nodes: int, ranks: Sequence[T]) -> list[Sequence[T]]:
    size = -(-len(ranks) // nodes)
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def rows_by_name(merged: MergedLayers) -> dict[str, np.ndarray]:
    return dict(zip(merged.names, merged.values, strict=True))
