"""Merges recorded rows of an attempt again, and judges them, with the code for live ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.values import Values
from mp_agent.flight.postmortem.diagnosis import LayerSample, RunHistory, Usual
from mp_agent.flight.record.evidence import Evidence
from mp_agent.node.accounting.learning import LearningTracker
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.windows import MAIN, median_of_sorted
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.flight.judge import RunJudge, TimedStep
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

_OF_TIME = {Quantity.LIFE, Quantity.AGENT, Quantity.CODE}
_JUDGED = tuple(
    condition
    for condition in CONDITIONS
    if not any(_OF_TIME.intersection(needed) for needed in condition.needs)
    and condition.name not in ("MpAgentRankStraggler", "MpAgentCoverageLow")
)
"""Not those on the pace of ranks and agents, which only real time shows."""
STEP_SECONDS = 20.0
"""Time that a step takes at least where a record is judged. Windows and delays of conditions are
minutes, which let go what lasts for some steps of a slow run; so that they do of a fast one, whose
record is over within seconds."""


def replay(ranks: Sequence[RankLog]) -> RunHistory:
    """Return the steps and layers of an attempt, with the live agent's numbers."""
    return _history(tuple(merged_items(ranks)))


def judged(evidence: Evidence) -> RunHistory:
    """Return the same with what the live agent judges of them, and where an incident began.

    A record begins within a run: the account takes the steps before it as made, so that no warm-up
    begins with it. What only a longer past shows is among the record's own conditions.
    """
    items = tuple(merged_items(evidence.ranks))
    return judged_items(items, evidence.values, evidence.identity.run)


def judged_items(items: Sequence[MergedStep | MergedTable], values: Values, run: str) -> RunHistory:
    """Return steps and layers, each table after its step, with what is judged of them."""
    history = _history(items)
    if not history.steps:
        return history
    # Those before the record were no warm-up.
    learning = LearningTracker(rates=history.steps[0].sequence - 1)
    judge = _Judge(run, values, _JUDGED, progress=Progress(learning=learning))
    judge.play(_timed(items, STEP_SECONDS * values.time_scale))
    incident = judge.account.progress.incident
    return replace(
        history,
        first_nonfinite=incident.first,
        first_nonfinite_sequence=incident.first_sequence,
        conditions=judge.episodes.conditions(),
        usual=judge.usual,
    )


def _history(items: Sequence[MergedStep | MergedTable]) -> RunHistory:
    return RunHistory(
        families=frozenset(name for item in items for name, own in item.families.items() if own),
        steps=tuple(item for item in items if isinstance(item, MergedStep)),
        tables=tuple(
            _layer_history(item.sequence, item.families[GRADIENTS.name])
            for item in items
            if not isinstance(item, MergedStep) and GRADIENTS.name in item.families
        ),
    )


class _Judge(RunJudge):
    """Notes what the account compared each step with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.usual: dict[int, Usual] = {}

    def fold(self, step: TimedStep) -> None:
        progress, limits = self.account.progress, self.account.thresholds
        losses, norms = progress.losses, progress.norms.histories.get(MAIN)
        loss = median_of_sorted(losses.ordered) if losses.ordered else None
        bound, norm = losses.next_bound(limits), None if norms is None else norms.usual
        super().fold(step)
        if isinstance(step.item, MergedStep):
            own = step.item.get("loss")
            self.usual[step.item.sequence] = Usual(
                loss=loss,
                loss_bound=bound,
                norm=norm,
                loss_above=own is not None and bound is not None and own > bound,
                exploded=bool(progress.norms.exploded),
            )


def _timed(items: Iterable[MergedStep | MergedTable], step_seconds: float) -> Iterator[TimedStep]:
    """Yield the items with their own times: a step takes at least so long."""
    now, before, index = 0.0, None, -1
    for item in items:
        if isinstance(item, MergedStep):
            took = 0.0 if before is None else item.time_unix_seconds - before
            before, index = item.time_unix_seconds, index + 1
            now = now + max(took, step_seconds) if index else before
            item = replace(item, time_unix_seconds=now)
        yield TimedStep(now, item, max(index, 0))


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


def _layer_history(sequence: int, layers: MergedLayers) -> LayerSample:
    return LayerSample(
        sequence=sequence,
        names=layers.names,
        columns=layers.family.names,
        values=layers.values,
        complete=layers.complete,
    )
