"""The root's part of a run, without rings and HTTP."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.many_nodes.model import Model
from benchmarks.many_nodes.node import SimulatedNode
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metric import Snapshot
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.run.ledger import ProbeTotals
from mp_agent.node.run.views import ServiceCounts, agent_view, rank_view, run_view
from mp_agent.node.series.layer_budget import LayerBudget
from mp_agent.node.series.snapshot_builder import RunExport, SnapshotBuilder
from mp_agent.records.conditions import ConditionMemory
from mp_agent.records.merged import MergedStep
from mp_agent.settings import Settings


class SimulatedRoot:
    """Merges, accounts, judges and exposes what nodes report."""

    def __init__(
        self, model: Model, directory: Path, settings: Settings, *, sampled: Sequence[int]
    ) -> None:
        """Start without steps; sampled: those on which layers are measured."""
        self.node = SimulatedNode(model, 0, settings, sampled=sampled)
        thresholds = resolve(settings.thresholds)
        self.account = Accumulator(
            thresholds, progress=Progress(), counters=CounterStore(), window_seconds=120.0
        )
        self.builder = SnapshotBuilder(thresholds, settings.max_series)
        self._layer_budget = LayerBudget()
        self._conditions = ConditionTracker(
            directory, values_in_force(settings.thresholds), memory=ConditionMemory()
        )
        self.last_step: MergedStep | None = None
        self.snapshot_taken = Snapshot()

    def fold(self, item: MergedStep | MergedTable) -> None:
        """Enter what was merged into the account, as `Run` does."""
        if isinstance(item, MergedStep):
            self.account.fold_step(item)
            self.last_step = item
        else:
            for layers in item.families.values():
                self.account.fold_layers(item.sequence, layers, step_judged=True)

    def judge(self, now_seconds: float) -> None:
        """Judge the run's conditions, if a second has passed since the last time."""
        self._conditions.tick(now_seconds, self._export)

    def snapshot(self) -> Snapshot:
        """Return what /metrics is made of."""
        self.snapshot_taken = self.builder.build([self._export()], time.time())
        return self.snapshot_taken

    def renew_layers(self) -> "SimulatedRoot":
        """Let the layers be of another table, with equal values."""
        for own in self.account.layers.values():
            own.update({name: replace(view) for name, view in own.items()})
        return self

    def _export(self) -> RunExport:
        attempt = self.node.attempt
        view = run_view(self.node.member, self.account, self._conditions, 0.0, time.time())
        return RunExport(
            run=self.node.name,
            node_rank=0,
            view=view,
            layers=tuple(view for own in self.account.layers.values() for view in own.values()),
            ranks=[rank_view(source, loss_misread=False) for source in attempt.sources.values()],
            faded_ranks=frozenset(),
            agent=agent_view(
                attempt, ProbeTotals(), counting_seconds=None, services=ServiceCounts()
            ),
            counters=self.account.counters,
            layer_budget=self._layer_budget,
        )
