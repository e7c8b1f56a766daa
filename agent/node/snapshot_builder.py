"""Evaluates the catalog over the views of every run: what the exporters read."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, METRICS
from mp_agent.catalog.snapshot import Family, HistogramValue, Sample, Snapshot
from mp_agent.node.counters import CounterBook, Labels, labelled
from mp_agent.records.merged import AgentView, LayerView, RankView, RunView

log = logging.getLogger("mp_agent.node")

_KEPT_OF_FADED_RANKS = {
    BY_PROMETHEUS_NAME[name] for name in ("mp_agent_rank_up", "mp_agent_rank_info")
}
_LAYER_METRICS = tuple(metric for metric in METRICS if metric.scope is Scope.LAYER)
_LAYER_NONFINITE = BY_PROMETHEUS_NAME["mp_agent_layer_grad_nonfinite_elements_total"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunExport:
    """All views of one run at one moment, and its counters."""

    run: str
    node_rank: int
    view: RunView | None
    """None on nodes that do not hold rank 0."""
    layers: Sequence[LayerView]
    ranks: Sequence[RankView]
    faded_ranks: frozenset[int]
    """Ranks that have been gone for so long that only their being gone is shown."""
    agent: AgentView
    counters: CounterBook

    def subjects(self, metric: Metric) -> Iterator[tuple[Labels, Any]]:
        """Yield (labels after `run` that the scope gives, view) of all that a metric is told of."""
        if metric.scope is Scope.LAYER:
            yield from (((layer.name,), layer) for layer in self.layers)
        elif metric.scope is Scope.RANK:
            for rank in self.ranks:
                if rank.identity.rank not in self.faded_ranks or metric in _KEPT_OF_FADED_RANKS:
                    yield (str(rank.identity.rank),), rank
        elif metric.scope is Scope.AGENT:
            yield (str(self.node_rank),), self.agent
        elif self.view is not None:
            yield (), self.view


@dataclass(slots=True)
class SnapshotBuilder:
    """Builds snapshots of at most `max_series` series, and counts what it left out."""

    thresholds: Mapping[str, float]
    max_series: int
    _dropped: dict[str, int] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

    def build(self, exports: Sequence[RunExport], time_unix_seconds: float) -> Snapshot:
        """Return the families of all runs in the catalog's order.

        Beyond `max_series` layers are left out, the worst kept: those that had non-finite
        elements, then those of the largest norm.
        """
        families = {
            metric: self._family(metric, exports)
            for metric in METRICS
            if metric.scope is not Scope.LAYER
        }
        room = self.max_series - sum(map(_series_count, families.values()))
        kept = self._keep_worst_layers(exports, max(room, 0) // len(_LAYER_METRICS))
        families |= {metric: self._family(metric, kept) for metric in _LAYER_METRICS}
        return Snapshot(tuple(families[metric] for metric in METRICS), time_unix_seconds)

    def take_dropped(self, run: str) -> int:
        """Return how many series of a run were left out since this was last asked."""
        return self._dropped.pop(run, 0)

    def _family(self, metric: Metric, exports: Sequence[RunExport]) -> Family:
        """Return a metric's family; a metric that raises is absent, logged once and counted."""
        samples: list[Sample] = []
        for export in exports:
            try:
                samples.extend(list(self._samples(metric, export)))
            except Exception:
                self._drop(export.run, 1)
                if metric.name not in self._failed:
                    self._failed.add(metric.name)
                    log.exception("%s cannot be read", metric.name)
        return Family(metric, tuple(samples))

    def _samples(self, metric: Metric, export: RunExport) -> Iterator[Sample]:
        for scope_labels, view in export.subjects(metric):
            values: Iterable[tuple[Labels, float | HistogramValue]]
            if metric.read is None:
                values = self._counted(metric, scope_labels, export.counters)
            else:
                values = labelled(metric.read(view))
            for labels, value in values:
                yield Sample((export.run, *scope_labels, *labels), value)

    def _counted(
        self, metric: Metric, scope_labels: Labels, counters: CounterBook
    ) -> Iterator[tuple[Labels, float | HistogramValue]]:
        """Yield (own labels, value) of a counted metric, at 0 what was not counted yet."""
        for labels in metric.label_values(self.thresholds) if metric.label_values else ((),):
            key = (*scope_labels, *labels)
            if metric.kind is Kind.HISTOGRAM:
                yield labels, counters.histogram(metric, key)
            else:
                yield labels, counters.total(metric, key)

    def _keep_worst_layers(self, exports: Sequence[RunExport], room: int) -> Sequence[RunExport]:
        """Return the exports with at most `room` layers in all."""
        layers = [(export, layer) for export in exports for layer in export.layers]
        if len(layers) <= room:
            return exports
        worst = sorted(layers, key=lambda pair: _badness(*pair), reverse=True)[:room]
        kept = {(id(export), layer.name) for export, layer in worst}
        for export, layer in layers:
            if (id(export), layer.name) not in kept:
                self._drop(export.run, len(_LAYER_METRICS))
        return [
            replace(
                export,
                layers=[layer for layer in export.layers if (id(export), layer.name) in kept],
            )
            for export in exports
        ]

    def _drop(self, run: str, series: int) -> None:
        self._dropped[run] = self._dropped.get(run, 0) + series


def _badness(export: RunExport, layer: LayerView) -> tuple[float, float]:
    nonfinite_elements = export.counters.total(_LAYER_NONFINITE, (layer.name,))
    return nonfinite_elements, layer.values["sum_squares"] if layer.judged else 0.0


def _series_count(family: Family) -> int:
    """Return how many series a family's samples make; a histogram's buckets, sum and count each."""
    if family.metric.kind is Kind.HISTOGRAM:
        return len(family.samples) * (len(family.metric.bounds) + 3)
    return len(family.samples)
