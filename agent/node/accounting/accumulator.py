"""Applies each merged step to the run's trackers, and to its step-exact counters."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

from mp_agent.catalog.metric import HistogramValue, Kind, Metric, Reading, Scope
from mp_agent.catalog.metrics import METRICS
from mp_agent.errors import FailureLog
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.baseline import Baseline, BaselineDeparture
from mp_agent.records.columns import ANOTHER_MODEL
from mp_agent.records.merged import MergedStep
from mp_agent.records.tensor_collections import TensorCollection
from mp_agent.records.views import LayerView, RunView

Labels = tuple[str, ...]
"""Label values after `run`: those of the scope, then the metric's own."""

Total = tuple[str, Labels, float]
"""Metric, labels, and a counter's value."""

Cells = tuple[str, Labels, list[float]]
"""Metric, labels, and a histogram's observations per bucket (not cumulative), then their sum."""

COUNTED = {
    scope: tuple(m for m in METRICS if m.count is not None and m.scope is scope) for scope in Scope
}


class CounterStore:
    """Counters and histograms of one run, by metric and labels. Missing entries are 0."""

    def __init__(
        self,
        totals: Iterable[Total] = (),
        histograms: Iterable[Cells] = (),
        *,
        metrics: Mapping[Scope, Sequence[Metric]] = COUNTED,
    ) -> None:
        """Start from earlier values. metrics: those that are counted, by scope."""
        self._totals = {(name, labels): value for name, labels, value in totals}
        self._histograms = {(name, labels): list(cells) for name, labels, cells in histograms}
        self._metrics = {scope: _counting(own) for scope, own in metrics.items()}
        layer_metrics = metrics.get(Scope.LAYER, ())
        self._family_metrics = {
            family: _counting(metric for metric in layer_metrics if metric.family == family)
            for family in {metric.family for metric in layer_metrics}
        }
        self._later: dict[str, list[Labels]] = {}
        """Labels that were not known beforehand, of the metrics that were asked for."""
        self._failures = FailureLog()
        self._risen: set[tuple[str, Labels]] = set()
        self._evidence_steps: dict[tuple[str, Labels], int] = {}

    def count(self, scope: Scope, scope_labels: Labels, change: Any) -> None:
        """Update every counted metric of `scope`, of a layer those of its family, with one step.

        A metric whose count function raises misses only this update; that is logged once.
        """
        if scope is Scope.LAYER:
            counted = self._family_metrics.get(change.family, [])
        else:
            counted = self._metrics[scope]
        for metric, count, adds_nothing in counted:
            try:
                reading = count(change)
            except Exception:
                self._failures.note("%s cannot be counted", metric.name, kind=metric.name)
                continue
            if reading is None or reading == adds_nothing:
                continue
            for labels, value in labelled(reading):
                self._add(metric, scope_labels + labels, value)
                if metric.evidence_step and value and (step := metric.evidence_step(change)):
                    self._evidence_steps[metric.name, scope_labels + labels] = step

    def total(self, metric: Metric, labels: Labels) -> float:
        """Return a counter's current value."""
        return self._totals.get((metric.name, labels), 0.0)

    def evidence_step(self, metric: Metric, labels: Labels) -> int | None:
        """Return the trainer's step of what a counter counted last, where that came before."""
        return self._evidence_steps.get((metric.name, labels))

    def entries(self, names: Collection[str]) -> Iterator[Total]:
        """Yield the nonzero counters of some metrics, given by name."""
        for (name, labels), value in self._totals.items():
            if name in names and value:
                yield name, labels, value

    def pop_risen(self) -> list[Total]:
        """Return the counters that have risen since the last call."""
        risen = [(name, labels, self._totals[name, labels]) for name, labels in self._risen]
        self._risen.clear()
        return risen

    def later(self, metric: Metric) -> list[Labels]:
        """Return the labels of a metric's series that are not known beforehand."""
        found = self._later.get(metric.name)
        if found is None:
            labels = (labels for name, labels in self._totals if name == metric.name)
            found = self._later[metric.name] = [own for own in labels if _is_later(metric, own)]
        return found

    def histogram(self, metric: Metric, labels: Labels) -> HistogramValue:
        """Return a histogram's current value, with cumulative counts."""
        cells = self._cells(metric, labels)
        cumulative, below = [], 0
        for count in cells[:-1]:
            below += int(count)
            cumulative.append(below)
        return HistogramValue((*metric.bounds, float("inf")), tuple(cumulative), cells[-1])

    def dump(self) -> tuple[list[Total], list[Cells]]:
        """Return all counters and histograms, in the form that the constructor accepts."""
        return (
            [(*key, value) for key, value in self._totals.items()],
            [(*key, cells) for key, cells in self._histograms.items()],
        )

    def _add(self, metric: Metric, labels: Labels, value: float) -> None:
        key = (metric.name, labels)
        if metric.kind is Kind.HISTOGRAM:
            cells = self._histograms[key] = self._cells(metric, labels)
            cells[bisect_left(metric.bounds, value)] += 1
            cells[-1] += value
        elif value > 0 or metric.has_later_series:
            # A series with labels that were unknown before starts at 0 and stays.
            if key not in self._totals and metric.name in self._later and _is_later(metric, labels):
                self._later[metric.name].append(labels)
            self._totals[key] = self._totals.get(key, 0.0) + max(value, 0.0)
            if value > 0:
                self._risen.add(key)

    def _cells(self, metric: Metric, labels: Labels) -> list[float]:
        """Return a histogram's cells; all 0 if there are none for the catalog's bounds."""
        cells = self._histograms.get((metric.name, labels), [])
        size = len(metric.bounds) + 2
        return cells if len(cells) == size else [0.0] * size


def _is_later(metric: Metric, labels: Labels) -> bool:
    known = len(metric.scope.value) - 1 + len(metric.labels)
    return metric.appears_when_counted or len(labels) > known


def _counting(
    metrics: Iterable[Metric],
) -> list[tuple[Metric, Callable[[Any], Reading], float | None]]:
    """Return metrics with their count functions, and the reading that adds nothing to a series."""
    return [
        (
            metric,
            metric.count,
            0.0 if metric.kind is Kind.COUNTER and not metric.has_later_series else None,
        )
        for metric in metrics
        if metric.count is not None
    ]


def labelled(reading: Reading) -> Iterable[tuple[Labels, float]]:
    """Return (own labels, value) of a reading; absent and non-finite values are left out."""
    # Most readings are a plain number, and asking whether one is a Mapping is slow.
    if reading is None or isinstance(reading, (float, int)):
        return (((), reading),) if reading is not None and isfinite(reading) else ()
    return [
        (labels, value)
        for labels, value in reading.items()
        if value is not None and isfinite(value)
    ]


class Accumulator:
    """The account of one run; gets each closed step exactly once, in order."""

    def __init__(
        self,
        thresholds: Mapping[str, float],
        *,
        progress: Progress,
        counters: CounterStore,
        window_seconds: float,
        baseline: Baseline | None = None,
    ) -> None:
        """window_seconds: length of the windows whose extremes are exported.

        baseline: what good runs looked like, if the run is judged against them.
        """
        self.thresholds = thresholds
        self._baseline = baseline
        self._window_seconds = window_seconds
        self._failures = FailureLog()
        self._follow(progress)
        self.counters = counters
        self.lost = 0
        """Records of the attempt, or layers of one, that a tracker could not add, and views of it
        that failed."""
        self.layers: dict[str, dict[str, LayerView]] = {}
        """Latest views of layers by family: each with norms that count, with a later one that does
        not; the latest view of a layer of which none counts."""

    def fold_step(self, step: MergedStep) -> None:
        """Update trackers and counters with a closed step."""
        if step.flag(ANOTHER_MODEL):
            self._follow(self.progress.next_model())
        previous, context = self.progress.last, self._context
        for tracker in self._observe:
            try:
                tracker.observe(step, context)
            except Exception:
                self._restart(tracker)
        change = self.progress.transition(step, previous, self.thresholds)
        self.counters.count(Scope.RUN, (), change)

    def fold_rank(self, rank: int, values: Mapping[str, float]) -> None:
        """Count one rank's own record of a closed step; values: its observed columns."""
        self.counters.count(Scope.RANK, (str(rank),), values)

    def fold_layers(
        self,
        sequence: int,
        layers: MergedLayers,
        *,
        step_judged: bool,
        step: int | None = None,
        collections: Sequence[TensorCollection] = (),
    ) -> None:
        """Update the layers with a sampled step. A layer keeps its last norm that counts.

        Where a parameter had no gradient there is nothing to show: it has not one of 0.

        step: the trainer's own; `sequence` by default. collections: those that the script has
        defined.
        """
        shown = self.layers.setdefault(layers.family.name, {})
        for name in layers.retired:
            shown.pop(name, None)
        step = sequence if step is None else step
        views = layers.views(step_judged=step_judged, step=step)
        for view in views:
            self.counters.count(Scope.LAYER, (view.name,), view)
            if not layers.family.has_rows(view.values):
                continue
            known = shown.get(view.name)
            if view.judged or known is None or not known.judged:
                shown[view.name] = view
            else:
                shown[view.name] = replace(known, later=view)
        sample = LayerObservation(
            sequence=sequence,
            step=step,
            layers=layers,
            views=views,
            collections=collections,
        )
        for tracker in self._trackers:
            try:
                tracker.observe_layers(sample, self._context)
            except Exception:
                self._restart(tracker)

    def begin_attempt(self) -> None:
        """Drop the state of the attempt that ended; counters continue."""
        self._follow(self.progress.next_attempt())
        self.layers, self.lost = {}, 0

    def view(self, run: RunView, time_unix_seconds: float) -> RunView:
        """Return the run with what the trackers know of it after the last step.

        Without any of that where one of them fails: its other metrics, and other runs, are there.
        """
        view = partial(self.progress.view, run, self._context, time_unix_seconds)
        found = self._failures.contain(
            view, "what is known of run %s cannot be shown", run.identity.run
        )
        if found is None:
            self.lost += 1
            return run
        return found

    def departures(self, facts: Mapping[str, str]) -> tuple[BaselineDeparture, ...] | None:
        """Return where the run differs from its baseline; None without one. facts: of the run."""
        return self.progress.baseline.view(self._context, facts)

    def _restart(self, tracker: Tracker) -> None:
        """Let a tracker begin again that has failed on a record, which is counted as lost."""
        name = type(tracker).__name__
        self._failures.note("%s begins again after a step that it cannot add", name, kind=name)
        self.lost += 1
        self._follow(self.progress.with_restarted(tracker))

    def _follow(self, progress: Progress) -> None:
        self.progress = progress
        self._trackers = tuple(progress.trackers)
        # Calling for each step what trackers leave out would take a while.
        self._observe = tuple(
            one for one in self._trackers if type(one).observe is not Tracker.observe
        )
        self._context = AccountContext(
            self.thresholds, self._window_seconds, progress, self._baseline
        )
