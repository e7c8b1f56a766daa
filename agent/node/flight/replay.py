"""Merges recorded rows of an attempt again, with the code that merges live ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mp_agent.flight.postmortem.diagnosis import LayerSample, RunHistory
from mp_agent.node.accounting.incidents import IncidentTracker
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.merge.coverage import AssumedShares, ExpectedShares, make_expected_shares
from mp_agent.node.merge.node_layers import LayerNames, RankLayers, reduce_layers
from mp_agent.node.merge.node_steps import RankStep, reduce_step
from mp_agent.node.merge.run_layers import LayerMerge, MergedLayers, ReportLayerColumns
from mp_agent.node.merge.run_steps import ReportColumns, StepMerge
from mp_agent.node.merge.schema_index import SchemaIndex
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import Schema, family_columns


def replay(ranks: Sequence[RankLog]) -> RunHistory:
    """Return the history of an attempt, with the live agent's numbers, incident and blamed rank."""
    merge = _Replay(ranks)
    steps = tuple(merge.steps())
    tables = tuple(
        (sequence, families[GRADIENTS.name])
        for sequence, families in merge.tables()
        if GRADIENTS.name in families
    )
    incident = _incident(steps, tables)
    return RunHistory(
        steps=steps,
        tables=tuple(_layer_history(sequence, layers) for sequence, layers in tables),
        first_nonfinite=incident.first,
        first_nonfinite_sequence=incident.first_sequence,
    )


def merged_items(ranks: Sequence[RankLog]) -> Iterator[MergedStep | MergedTable]:
    """Yield the steps of an attempt and, each after its step, the layers that were sampled.

    Steps and layers have all families that were measured.
    """
    merge = _Replay(ranks)
    steps = list(merge.steps())
    tables = dict(merge.tables())
    for step in steps:
        yield step
        if step.sequence in tables:
            yield MergedTable(step.sequence, tables[step.sequence])


@dataclass(slots=True)
class _Node:
    """The rows that the ranks of one node wrote, by sequence number."""

    holds_root: bool
    schema_index: SchemaIndex = field(default_factory=SchemaIndex)
    steps: dict[int, list[RankStep]] = field(default_factory=dict)
    tables: dict[int, list[RankLayers]] = field(default_factory=dict)


class _Replay:
    def __init__(self, ranks: Sequence[RankLog]) -> None:
        self._ranks = ranks
        self._world_size = ranks[0].identity.world_size
        self._assumed = AssumedShares()
        self._names = LayerNames()
        self._expected_by_schemas: dict[tuple[int, ...], ExpectedShares] = {}
        self._nodes: dict[int, _Node] = {}
        for log in ranks:
            self._add(log)

    def steps(self) -> Iterator[MergedStep]:
        for sequence in sorted({s for node in self._nodes.values() for s in node.steps}):
            merge = StepMerge(sequence, self._world_size)
            for node in self._nodes.values():
                if sequence in node.steps:
                    row = reduce_step(node.steps[sequence], node.schema_index)
                    schema_index = node.schema_index
                    merge.add(
                        row,
                        ReportColumns(
                            schema_index.step_columns,
                            family_columns(schema_index.families),
                            schema_index.shares,
                        ),
                        arrived_unix_seconds=None if node.holds_root else row.time_unix_seconds,
                    )
            layers = self._layers(sequence).copies
            yield merge.merged(self._expected_shares(sequence), self._assumed, layers)

    def tables(self) -> Iterator[tuple[int, Mapping[str, MergedLayers]]]:
        """Yield the layers' families, by sequence number."""
        for sequence in sorted({s for node in self._nodes.values() for s in node.tables}):
            expected = self._expected_shares(sequence)
            yield sequence, self._layers(sequence).merged(expected, self._assumed, self._names)

    def _layers(self, sequence: int) -> LayerMerge:
        """Return the layers of a step, as far as any were recorded."""
        merge = LayerMerge(self._world_size)
        for node in self._nodes.values():
            if sequence in node.tables:
                schema_index = node.schema_index
                merge.add(
                    reduce_layers(sequence, node.tables[sequence], schema_index),
                    ReportLayerColumns(
                        family_columns(schema_index.families),
                        schema_index.shares,
                        schema_index.layouts,
                    ),
                )
        return merge

    def _add(self, log: RankLog) -> None:
        identity = log.identity
        node = self._nodes.setdefault(identity.node_rank, _Node(holds_root=False))
        node.holds_root |= identity.rank == 0
        for segment in log.segments:
            for step in segment.steps:
                row = RankStep(identity.rank, segment.schema, step)
                node.steps.setdefault(step.sequence, []).append(row)
            for table in segment.tables:
                layers = RankLayers(identity.rank, segment.schema, table.families)
                node.tables.setdefault(table.sequence, []).append(layers)

    def _expected_shares(self, sequence: int) -> ExpectedShares:
        """Return the shares of all ranks at a step, including those that did not deliver it."""
        schemas = [(log.identity.node_rank, _schema_at(log, sequence)) for log in self._ranks]
        known = [(node, schema) for node, schema in schemas if schema is not None]
        key = tuple(id(schema) for _, schema in known)
        if key not in self._expected_by_schemas:
            held = {
                schema_index.shares[place.share]
                for node, schema in known
                for schema_index in (self._nodes[node].schema_index,)
                for place in schema_index.plan(schema).places
            }
            self._expected_by_schemas[key] = make_expected_shares(
                held, ranks_known=len(known), world_size=self._world_size
            )
        return self._expected_by_schemas[key]


def _schema_at(log: RankLog, sequence: int) -> Schema | None:
    """Return the schema that a rank wrote a step under, or would have."""
    found = log.segments[0].schema if log.segments else None
    for segment in log.segments:
        sequences = [step.sequence for step in segment.steps]
        begin = min([*sequences, *(table.sequence for table in segment.tables)], default=0)
        found = segment.schema if begin <= sequence else found
    return found


def _incident(
    steps: Iterable[MergedStep], tables: Iterable[tuple[int, MergedLayers]]
) -> IncidentTracker:
    incident = IncidentTracker()
    for step in steps:
        incident.fold(step)
    for sequence, layers in tables:
        if nearest_output := layers.nonfinite_nearest_output():
            incident.set_layer(sequence, nearest_output)
    return incident


def _layer_history(sequence: int, layers: MergedLayers) -> LayerSample:
    return LayerSample(
        sequence=sequence,
        names=layers.names,
        columns=layers.family.names,
        values=layers.values,
        complete=layers.complete,
    )
