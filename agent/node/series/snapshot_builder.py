"""Evaluates the metric catalog over the views of a run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mp_agent.catalog.metric import Family, HistogramValue, Kind, Metric, Sample, Scope, Snapshot
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, METRICS
from mp_agent.errors import FailureLog
from mp_agent.node.accounting.accumulator import CounterStore, Labels, labelled
from mp_agent.node.series.layer_budget import LayerBudget
from mp_agent.records.columns import FAMILIES, ColumnFamily
from mp_agent.records.steps import EndReason
from mp_agent.records.views import AgentView, LayerView, RankView, RunView

_SPACE = 1.2
"""How much more room than needed there must be before metrics that gave way come back."""


def giving_way(
    metrics: Sequence[Metric], families: Sequence[ColumnFamily]
) -> tuple[frozenset[Metric], ...]:
    """Return what is left out at each level, from nothing to all that gives way.

    First, family by family from the last one on, the gauges that say `gives_way`; then, in the same
    order, all gauges of a family. The first family keeps its own, and counters never give way:
    layers are rolled up instead.
    """
    steps = [
        *({m for m in metrics if m.gives_way and m.family == f.name} for f in reversed(families)),
        *(
            {m for m in metrics if m.read is not None and m.family == f.name}
            for f in reversed(families[1:])
        ),
    ]
    levels: list[frozenset[Metric]] = [frozenset()]
    for step in steps:
        if step - levels[-1]:
            levels.append(levels[-1] | step)
    return tuple(levels)


class LayerMetrics:
    """Decides which metrics of layers give way; they come back once there is space again."""

    def __init__(self, metrics: Sequence[Metric], families: Sequence[ColumnFamily]) -> None:
        self.all = tuple(metric for metric in metrics if metric.scope is Scope.LAYER)
        self._levels = giving_way(self.all, families)
        self._level = 0

    def choose(
        self, layers: Mapping[str, int], series: Mapping[Metric, int], room: int
    ) -> tuple[Metric, ...]:
        """Return those to export in a number of series.

        layers: numbers of layers, by family. series: of one layer, by metric.
        """
        for level, hidden in enumerate(self._levels):
            shown = tuple(metric for metric in self.all if metric not in hidden)
            needed = sum(layers.get(metric.family, 0) * series[metric] for metric in shown)
            if needed * (_SPACE if level < self._level else 1.0) <= room:
                break
        self._level = level
        return shown


_RANK_UP = BY_PROMETHEUS_NAME["mp_agent_rank_up"]
_KEPT_OF_FADED_RANKS = {_RANK_UP, BY_PROMETHEUS_NAME["mp_agent_rank_info"]}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunExport:
    """All views of one run at one moment, and its counters."""

    run: str
    """Empty where the node agent has no run."""
    node_rank: int | None
    """None where the node agent has no run."""
    view: RunView | None
    """None on nodes that do not hold rank 0."""
    layers: Sequence[LayerView]
    ranks: Sequence[RankView]
    faded_ranks: frozenset[int]
    """Ranks that have been gone for so long that only their being gone is shown."""
    agent: AgentView
    counters: CounterStore
    named_ranks: frozenset[int] = frozenset()
    """Ranks that conditions name."""
    layer_budget: LayerBudget = field(default_factory=LayerBudget)
    """Decides which layers are exported individually when there are too many."""

    def subjects(self, metric: Metric) -> Iterator[tuple[Labels, Any]]:
        """Yield (labels after `run` that the scope gives, view) of all that a metric covers."""
        if metric.scope is Scope.LAYER:
            own = (layer for layer in self.layers if layer.family == metric.family)
            yield from (((layer.name,), layer) for layer in own)
        elif metric.scope is Scope.RANK:
            for rank in self.ranks:
                if rank.identity.rank not in self.faded_ranks or metric in _KEPT_OF_FADED_RANKS:
                    yield (str(rank.identity.rank),), rank
        elif metric.scope is Scope.AGENT:
            yield ("" if self.node_rank is None else str(self.node_rank),), self.agent
        elif self.view is not None:
            yield (), self.view

    @property
    def troubled_ranks(self) -> frozenset[int]:
        """The ranks that something is wrong with, as far as this node knows."""
        own = {rank.identity.rank for rank in self.ranks if _is_troubled(rank)}
        return self.named_ranks | own | (set() if self.view is None else _named(self.view))


def _is_troubled(rank: RankView) -> bool:
    """Return whether a rank itself shows that it died, or that its last loss was not finite."""
    died = not rank.up and rank.state.end_reason is not EndReason.COMPLETED
    return died or (rank.values or {}).get("loss_nonfinite", 0.0) > 0


def _named(run: RunView) -> set[int]:
    """Return the ranks that metrics of the run name."""
    ranks = {laggard.rank for laggard in run.laggards}
    ranks |= {one.rank for one in (run.straggler, run.loss_outliers, run.loss_level) if one}
    ranks.update(*(replicas.minority_ranks for replicas in run.replicas.values()))
    if run.latest.step is not None:
        ranks.update(run.latest.step.missing_ranks)
    if run.first_nonfinite is not None and run.first_nonfinite.rank.isdecimal():
        ranks.add(int(run.first_nonfinite.rank))
    return ranks


_MUCH_WORSE = 2.0
"""How many times as long a rank must compute to take the series of another."""


def worst_ranks(
    ranks: Sequence[RankView], series: Mapping[str, int], room: int, known: frozenset[str]
) -> frozenset[str]:
    """Return which healthy ranks have their own series, those with the longest lag first.

    Then those that compute longest before their first collective. The ones that are known stay,
    but for the much worse, so that series rarely come and go.

    series: of each rank, by its label. known: the last result.
    """
    furthest = max((rank.step or 0 for rank in ranks), default=0)

    def badness(rank: RankView) -> tuple[float, float, int]:
        # Ranks are read one after the other, while they make a step.
        lag = max(furthest - (rank.step or 0) - 1, 0)
        compute = (rank.values or {}).get("compute_seconds", 0.0)
        kept = _MUCH_WORSE if str(rank.identity.rank) in known else 1.0
        return lag, compute * kept, -rank.identity.rank

    own = set()
    for rank in sorted(ranks, key=badness, reverse=True):
        label = str(rank.identity.rank)
        if series.get(label, 0) > room:
            break
        room -= series.get(label, 0)
        own.add(label)
    return frozenset(own)


def samples_of(
    metric: Metric, export: RunExport, thresholds: Mapping[str, float]
) -> Iterator[Sample]:
    """Yield a metric's samples of one run; a counted one is there, at 0, before it was counted."""
    own_labels = len(metric.labels) + len(metric.optional_labels)
    for scope_labels, view in export.subjects(metric):
        values: Iterable[tuple[Labels, float | HistogramValue]]
        if metric.read is None:
            values = _counted(metric, scope_labels, export.counters, thresholds)
        else:
            values = labelled(metric.read(view))
        for labels, value in values:
            # Optional labels that the series lacks are empty.
            lacking = ("",) * (own_labels - len(labels))
            yield Sample((export.run, *scope_labels, *labels, *lacking), value)


def _counted(
    metric: Metric, scope_labels: Labels, counters: CounterStore, thresholds: Mapping[str, float]
) -> Iterator[tuple[Labels, float | HistogramValue]]:
    known = metric.label_values(thresholds) if metric.label_values else ((),)
    if metric.appears_when_counted:
        known = ()
    if metric.has_later_series:
        found = (labels[len(scope_labels) :] for labels in counters.later(metric))
        known = tuple(dict.fromkeys((*known, *found)))
    for labels in known:
        key = (*scope_labels, *labels)
        if metric.kind is Kind.HISTOGRAM:
            yield labels, counters.histogram(metric, key)
        else:
            yield labels, counters.total(metric, key)


@dataclass(slots=True)
class SnapshotBuilder:
    """Builds snapshots of at most `max_series` series, and counts what it left out."""

    thresholds: Mapping[str, float]
    max_series: int
    rank_series: int | None = None
    metrics: Sequence[Metric] = METRICS
    families: Sequence[ColumnFamily] = FAMILIES
    _dropped: dict[str, int] = field(default_factory=dict)
    _failures: FailureLog = field(default_factory=FailureLog)
    _own_ranks: dict[str, frozenset[str]] = field(default_factory=dict)
    """Healthy ranks with their own series, by run."""
    _layer_metrics: LayerMetrics = field(init=False)

    def __post_init__(self) -> None:
        self._layer_metrics = LayerMetrics(self.metrics, self.families)

    def build(self, exports: Sequence[RunExport], time_unix_seconds: float) -> Snapshot:
        """Return the families of all runs in the catalog's order.

        Where all layers do not fit into `max_series`, metrics of layers are left out first, in the
        order of `layer_metrics.giving_way`. Beyond it only the worst layers have their own series,
        the others are rolled up by module.
        """
        families = {
            metric: self._family(metric, exports)
            for metric in self.metrics
            if metric.scope is Scope.RANK
        }
        if self.rank_series is not None:
            families, exports = self._limit_ranks(families, exports, self.rank_series)
        families |= {
            metric: self._family(metric, exports)
            for metric in self.metrics
            if metric.scope not in (Scope.LAYER, Scope.RANK)
        }
        room = self.max_series - sum(map(_series_count, families.values()))
        shown = self._choose_layer_metrics(exports, room)
        governed = self._govern_layers(exports, room, shown)
        families |= {
            metric: self._family(metric, governed) if metric in shown else Family(metric, ())
            for metric in self._layer_metrics.all
        }
        return Snapshot(tuple(families[metric] for metric in self.metrics), time_unix_seconds)

    def pop_dropped(self, run: str) -> int:
        """Return how many series of a run were left out since the last call."""
        return self._dropped.pop(run, 0)

    def _family(self, metric: Metric, exports: Sequence[RunExport]) -> Family:
        """Return a metric's family; a metric that raises is absent, logged once and counted."""
        samples: list[Sample] = []
        for export in exports:
            try:
                samples.extend(list(samples_of(metric, export, self.thresholds)))
            except Exception:
                self._drop(export.run, 1)
                self._failures.note("%s cannot be read", metric.name, kind=metric.name)
        return Family(metric, tuple(samples))

    def _limit_ranks(
        self, families: Mapping[Metric, Family], exports: Sequence[RunExport], room: int
    ) -> tuple[dict[Metric, Family], list[RunExport]]:
        """Return the families of ranks within `rank_series`, and who counts what is left out."""
        series = Counter(
            sample.labels[:2]
            for metric, family in families.items()
            if metric is not _RANK_UP
            for sample in family.samples
        )
        hidden: set[Labels] = set()
        counting = []
        for export in exports:
            run, troubled = export.run, export.troubled_ranks
            healthy = [rank for rank in export.ranks if rank.identity.rank not in troubled]
            of_rank = {rank: count for (owner, rank), count in series.items() if owner == run}
            known = self._own_ranks.get(run, frozenset())
            own = self._own_ranks[run] = worst_ranks(healthy, of_rank, room, known)
            others = {str(rank.identity.rank) for rank in healthy} - own
            hidden |= {(run, rank) for rank in others}
            left_out = float(sum(of_rank.get(rank, 0) for rank in others))
            counting.append(
                replace(export, agent=replace(export.agent, rank_series_left_out=left_out))
            )
        limited = {
            metric: family
            if metric is _RANK_UP
            else Family(metric, tuple(s for s in family.samples if s.labels[:2] not in hidden))
            for metric, family in families.items()
        }
        return limited, counting

    def _choose_layer_metrics(self, exports: Sequence[RunExport], room: int) -> tuple[Metric, ...]:
        """Return the layer metrics to export; count the series of those that give way."""
        layers = Counter(layer.family for export in exports for layer in export.layers)
        series = {metric: self._series(metric) for metric in self._layer_metrics.all}
        shown = self._layer_metrics.choose(layers, series, room)
        hidden = Counter[str]()
        for metric in self._layer_metrics.all:
            if metric not in shown:
                hidden[metric.family] += series[metric]
        for export in exports if hidden else ():
            if left_out := sum(hidden[layer.family] for layer in export.layers):
                self._drop(export.run, left_out)
        return shown

    def _govern_layers(
        self, exports: Sequence[RunExport], room: int, metrics: Sequence[Metric]
    ) -> Sequence[RunExport]:
        """Return the exports with layers and roll-ups of at most `room` series in all."""
        present = {layer.family for export in exports for layer in export.layers}
        series: dict[str, int] = dict.fromkeys(present, 0)
        for metric in metrics:
            if metric.family in present:
                series[metric.family] += self._series(metric)
        names = [{layer.name for layer in export.layers} for export in exports]
        layers = sum(map(len, names))
        room = max(room, 0) // max(sum(series.values()), 1)
        counted = tuple(metric for metric in self._layer_metrics.all if metric.count is not None)
        governed = []
        for export, own_names in zip(exports, names, strict=True):
            share = room * len(own_names) // layers if layers else 0
            shown, counters = export.layer_budget.govern(
                export.layers, export.counters, counted, share
            )
            own = {layer.name for layer in shown}
            hidden = sum(series[layer.family] for layer in export.layers if layer.name not in own)
            if hidden:
                self._drop(export.run, hidden)
            governed.append(replace(export, layers=shown, counters=counters))
        return governed

    def _series(self, metric: Metric) -> int:
        """Return how many series a layer has of a metric."""
        return len(metric.label_values(self.thresholds)) if metric.label_values else 1

    def _drop(self, run: str, series: int) -> None:
        self._dropped[run] = self._dropped.get(run, 0) + series


def _series_count(family: Family) -> int:
    """Return how many series a family's samples make; a histogram's buckets, sum and count each."""
    if family.metric.kind is Kind.HISTOGRAM:
        return len(family.samples) * (len(family.metric.bounds) + 3)
    return len(family.samples)
