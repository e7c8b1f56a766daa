"""Updates a run's counters and derived state with each closed step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mp_agent.catalog.metric import Scope
from mp_agent.node.accounting.counters import CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.health import Health, Laggard
from mp_agent.records.merged import MergedStep, StepTransition
from mp_agent.records.tensor_collections import TensorCollection
from mp_agent.records.views import LayerView


class Accumulator:
    """The account of one run; gets each closed step exactly once, in order."""

    def __init__(
        self,
        thresholds: Mapping[str, float],
        *,
        progress: Progress,
        counters: CounterStore,
        window_seconds: float,
    ) -> None:
        """window_seconds: length of the windows whose extremes are exported."""
        self._thresholds = thresholds
        self._window_seconds = window_seconds
        self._follow(progress)
        self.counters = counters
        self.layers: dict[str, dict[str, LayerView]] = {}
        """By family, the latest view of each layer whose norms count, with a later one that does
        not; the latest view of a layer of which none counts."""

    def fold_step(self, step: MergedStep) -> None:
        """Update trackers and counters with a closed step."""
        previous, context = self.progress.last, self._context
        for observe in self._observe:
            observe(step, context)
        found: dict[str, Any] = {}
        for transition in self._transitions:
            found.update(transition())
        change = StepTransition(step=step, previous=previous, thresholds=self._thresholds, **found)
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
            tracker.observe_layers(sample, self._context)

    def begin_attempt(self) -> None:
        """Drop the state of the attempt that ended; counters continue."""
        self._follow(self.progress.next_attempt())
        self.layers = {}

    def view(self, time_unix_seconds: float, laggards: tuple[Laggard, ...] = ()) -> dict[str, Any]:
        """Return the fields of a `RunView` that the trackers know.

        laggards: from `stragglers.laggards`.
        """
        context = self._context
        found = _united(own.view(context, time_unix_seconds) for own in self._trackers)
        return {**found, "health": self.health(laggards)}

    def view_of_step(self) -> dict[str, Any]:
        """Return those of the fields that conditions follow on every step."""
        context = self._context
        return _united(own.view(context, 0.0) for own in self._trackers if own.every_step)

    def health(self, laggards: tuple[Laggard, ...] = ()) -> Health:
        """Return the run's health by its own history; laggards: from `stragglers.laggards`."""
        context = self._context
        found = _united(tracker.health(context) for tracker in self._trackers)
        return Health(laggards=laggards, **found)

    def _follow(self, progress: Progress) -> None:
        self.progress = progress
        self._trackers = tuple(progress.trackers)
        # Most trackers leave most methods out; calling those for each step would take a while.
        self._observe = tuple(
            one.observe for one in self._trackers if type(one).observe is not Tracker.observe
        )
        self._transitions = tuple(
            one.transition
            for one in self._trackers
            if type(one).transition is not Tracker.transition
        )
        self._context = AccountContext(self._thresholds, self._window_seconds, progress)


def _united(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    united: dict[str, Any] = {}
    for own in found:
        united.update(own)
    return united
