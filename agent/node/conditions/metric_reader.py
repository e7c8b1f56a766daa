"""Reads the catalog's samples of one run for the detector, as they would be exposed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite

from mp_agent.alerting.detector.readings import Key, KnownValue, Labels, Reading
from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metric import Reading as CatalogReading
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, METRICS
from mp_agent.catalog.snapshot import HistogramValue
from mp_agent.node.accounting.counters import CounterStore, labelled
from mp_agent.node.series.snapshot_builder import RunExport, samples_of
from mp_agent.records.views import RunView


class MetricReader:
    """Reads only the metrics that conditions use. `names`: as they are exposed."""

    def __init__(self, names: frozenset[str], thresholds: Mapping[str, float]) -> None:
        self._thresholds = thresholds
        metrics = [metric for metric in METRICS if _exposed(metric) & names]
        plain = [metric for metric in metrics if _is_plain(metric)]
        self._labelled = [metric for metric in metrics if metric not in plain]
        self._read = [(_key(metric), metric.read) for metric in plain if metric.read]
        self._counted = [(_key(metric), metric) for metric in plain if not metric.read]
        self._confirmed = [own for own in self._counted if own[1].evidence_step]
        self._gauges = [
            (metric, metric.read)
            for metric in metrics
            if metric.read and metric.kind is Kind.GAUGE and metric.scope is Scope.RUN
        ]
        self._by_name = {
            metric.name: metric
            for metric in metrics
            if metric.count and metric.kind is Kind.COUNTER and metric.scope is Scope.RUN
        }

    def all_series(self, export: RunExport) -> Iterator[Reading]:
        """Yield every series of the metrics, without the label `run` and empty labels."""
        if export.view is not None:
            yield from _values(self._read, export.view)
            for key, metric in self._counted:
                yield key, export.counters.total(metric, ())
        for metric in self._labelled:
            names = metric.label_names[1:]
            for sample in samples_of(metric, export, self._thresholds):
                pairs = zip(names, sample.labels[1:], strict=True)
                labels = tuple((name, text) for name, text in pairs if text)
                if isinstance(sample.value, HistogramValue):
                    yield (f"{metric.prometheus_name}_sum", labels), sample.value.sum
                    count = float(sample.value.cumulative_counts[-1])
                    yield (f"{metric.prometheus_name}_count", labels), count
                else:
                    yield (metric.prometheus_name, labels), sample.value

    def evidence_steps(self, counters: CounterStore) -> Mapping[Key, int]:
        """Return of which step a counter is that later steps had to confirm."""
        steps = {key: counters.evidence_step(metric, ()) for key, metric in self._confirmed}
        return {key: step for key, step in steps.items() if step is not None}

    def moved(self, view: RunView, counters: CounterStore) -> Iterator[Reading]:
        """Yield the run's gauges, which do not retain earlier values, and the counters that rose.

        Those that rose since the last call: a condition holds since the step on which one did.
        """
        for name, labels, value in counters.pop_risen():
            if (counted := self._by_name.get(name)) is not None:
                pairs = zip(counted.label_names[1:], labels, strict=False)
                own = tuple((label, text) for label, text in pairs if text)
                yield (counted.prometheus_name, own), value
        for metric, read in self._gauges:
            names = metric.label_names[1:]
            for texts, value in labelled(read(view)):
                # Missing optional labels come last.
                yield (metric.prometheus_name, tuple(zip(names, texts, strict=False))), value


def known_before(counters: CounterStore) -> KnownValue:
    """Return the values that counters had when the previous node agent ended.

    Gauges start from their first reading: when they rose is not known.
    """
    totals = {(name, labels): value for name, labels, value in counters.dump()[0]}

    def known_value(name: str, labels: Labels, value: float) -> float | None:
        metric = BY_PROMETHEUS_NAME.get(name)
        if metric is None or metric.count is None:
            return value
        return totals.get((metric.name, _counter_labels(metric, labels)), 0.0)

    return known_value


def _counter_labels(metric: Metric, labels: Labels) -> tuple[str, ...]:
    """Return label values as counters are keyed by: optional labels only if present."""
    found = dict(labels)
    return tuple(
        found.get(name, "")
        for name in metric.label_names[1:]
        if name in found or name not in metric.optional_labels
    )


def _values(
    reads: Iterable[tuple[Key, Callable[[RunView], CatalogReading]]], view: RunView
) -> Iterator[Reading]:
    for key, read in reads:
        value = read(view)
        if isinstance(value, (int, float)) and isfinite(value):
            yield key, float(value)


def _is_plain(metric: Metric) -> bool:
    """Return whether a metric is one series per run."""
    return metric.label_names == Scope.RUN.value and metric.kind is not Kind.HISTOGRAM


def _key(metric: Metric) -> Key:
    return metric.prometheus_name, ()


def _exposed(metric: Metric) -> frozenset[str]:
    name = metric.prometheus_name
    return frozenset((f"{name}_sum", f"{name}_count") if metric.kind is Kind.HISTOGRAM else (name,))
