"""Updates a run's counters and derived state with each closed step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.catalog.metric import Scope
from mp_agent.node.accounting.counters import CounterStore
from mp_agent.node.accounting.gradient_norms import NormTracker
from mp_agent.node.accounting.incidents import IncidentTracker
from mp_agent.node.accounting.layer_health import LayerHealth
from mp_agent.node.accounting.layer_health_state import LayerHealthState
from mp_agent.node.accounting.learning import LearningTracker
from mp_agent.node.accounting.loss import LossTracker
from mp_agent.node.accounting.loss_scale_floor import FloorSkips
from mp_agent.node.accounting.pace import Pace
from mp_agent.node.accounting.stragglers import StragglerTracker
from mp_agent.node.accounting.windows import OptimizerWindows, ValueWindow
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.health import Health, Laggard, NormStanding, Straggler
from mp_agent.records.merged import MergedStep, StepTransition
from mp_agent.records.views import DivergenceView, LayerView, OptimizerView


def follow_optimizers(
    known: Mapping[str, OptimizerView], step: MergedStep
) -> dict[str, OptimizerView]:
    """Return the optimizers after a step; each keeps its last step whose norms count.

    Optimizers that no rank holds any more are dropped.
    """
    views = {name: view for name, view in known.items() if name in step.optimizers_held}
    for name, own in step.optimizers.items():
        before = views[name].judged if name in views else None
        views[name] = OptimizerView(last=own, judged=own if own.judged else before)
    return views


def follow_replicas(
    known: Mapping[str, DivergenceView], step: MergedStep
) -> dict[str, DivergenceView]:
    """Return the last comparison of each kind after a step."""
    views = dict(known)
    for kind, found in step.replicas.items():
        views[kind] = DivergenceView(
            agree=found.agree, step=step.step, minority_ranks=found.minority_ranks
        )
    return views


@dataclass(slots=True, kw_only=True)
class Progress:
    """Derived state after the last closed step, other than counters."""

    last: MergedStep | None = None
    judged: MergedStep | None = None
    """The last step whose norms count."""
    loss: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    loss_scale_initial: float | None = None
    loss_scale_calibrated: float | None = None
    loss_scale_consecutive_decreases: int = 0
    incident: IncidentTracker = field(default_factory=IncidentTracker)
    optimizers: dict[str, OptimizerView] = field(default_factory=dict)
    """Only where there are several."""
    replicas: dict[str, DivergenceView] = field(default_factory=dict)
    losses: LossTracker = field(default_factory=LossTracker)
    norms: NormTracker = field(default_factory=NormTracker)
    learning: LearningTracker = field(default_factory=LearningTracker)
    floor: FloorSkips = field(default_factory=FloorSkips)
    pace: Pace = field(default_factory=Pace)
    straggler: Straggler | None = None
    layers: LayerHealthState = field(default_factory=LayerHealthState)


class Accumulator:
    """The account of one run; gets each closed step exactly once, in order."""

    def __init__(
        self,
        thresholds: Mapping[str, float],
        *,
        progress: Progress,
        counters: CounterStore,
        norms: ValueWindow,
        optimizer_norms: OptimizerWindows | None = None,
    ) -> None:
        self._thresholds = thresholds
        self.progress = progress
        self.counters = counters
        self.norms = norms
        self.optimizer_norms = optimizer_norms or OptimizerWindows(norms.window_seconds)
        self.layers: dict[str, dict[str, LayerView]] = {}
        """By family, the latest view of each layer whose norms count, else the latest view."""
        self._layer_health = LayerHealth(progress.layers)
        self._stragglers = StragglerTracker(progress.straggler)

    def fold_step(self, step: MergedStep) -> None:
        """Update counters, gauges, windows and the incident with a closed step."""
        progress, thresholds = self.progress, self._thresholds
        progress.incident.fold(step)
        progress.learning.fold(step, thresholds)
        self._fold_norms(step)
        progress.losses.fold(step, thresholds)
        self._confirm_rate_jump(step)
        progress.floor.fold(step, thresholds)
        progress.pace.fold(step.get("step_seconds"))
        change = StepTransition(
            step=step,
            previous=progress.last,
            thresholds=thresholds,
            nonfinite_loss_skips=progress.incident.suspect_steps,
            recent_floor_skips=progress.floor.recent,
            loss_spiking=progress.losses.spiking and not progress.learning.restarted,
            exploded=progress.norms.exploded,
            nonfinite_gradient_steps=progress.learning.nonfinite_steps,
            rate_jumped=progress.learning.rate_jumped,
        )
        self.counters.count(Scope.RUN, (), change)
        self._fold_loss_scale(step)
        if not step.skipped and step.coverage == 1.0:
            self._stragglers.fold(step.compute_seconds)
        progress.straggler = self._stragglers.worst
        progress.optimizers = follow_optimizers(progress.optimizers, step)
        progress.replicas = follow_replicas(progress.replicas, step)
        progress.last = step
        progress.loss = _newer(step.get("loss"), progress.loss)
        progress.learning_rate = _newer(step.get("learning_rate"), progress.learning_rate)
        if step.gradients_judged and (norm := step.grad_norm) is not None:
            progress.judged = step
            self.norms.add(norm, step.time_unix_seconds)
        self.optimizer_norms.fold(step)

    def fold_rank(self, rank: int, values: Mapping[str, float]) -> None:
        """Count one rank's own record of a closed step; values: its observed columns."""
        self.counters.count(Scope.RANK, (str(rank),), values)

    def fold_layers(self, sequence: int, layers: MergedLayers, *, step_judged: bool) -> None:
        """Update the layers with a sampled step. A layer keeps its last norm that counts."""
        shown = self.layers.setdefault(layers.family.name, {})
        for name in layers.retired:
            shown.pop(name, None)
        views = layers.views(step_judged=step_judged)
        for view in views:
            self.counters.count(Scope.LAYER, (view.name,), view)
            if view.judged or not (view.name in shown and shown[view.name].judged):
                shown[view.name] = view
        if layers.family is not GRADIENTS:
            return
        self._layer_health.retire(layers.retired)
        self._layer_health.fold(views, self._thresholds)
        if nearest_output := layers.nonfinite_nearest_output():
            self.progress.incident.set_layer(sequence, nearest_output)

    def begin_attempt(self) -> None:
        """Drop the state of the attempt that ended; counters continue."""
        self._layer_health.begin_attempt()
        self.progress = Progress(
            loss_scale_initial=self.progress.loss_scale_initial, layers=self.progress.layers
        )
        self._stragglers = StragglerTracker()
        self.norms.clear()
        self.optimizer_norms.clear()
        self.layers = {}

    def health(self, laggards: tuple[Laggard, ...] = ()) -> Health:
        """Return the run's health by its own history; laggards: from `stragglers.laggards`."""
        progress, thresholds = self.progress, self._thresholds
        return Health(
            loss=progress.losses.level(thresholds),
            loss_trend=progress.losses.trend(thresholds),
            loss_rising_steps=progress.losses.rising_steps,
            loss_standing=progress.losses.reference.standing,
            norms={
                name: NormStanding(usual=history.usual, peak=history.peak, below=history.below)
                for name, history in progress.norms.courses.items()
            },
            untrained=progress.learning.untrained,
            scaled_clip_steps=progress.learning.scaled_clip_steps,
            usual_step_seconds=progress.pace.usual_seconds,
            straggler=progress.straggler,
            laggards=laggards,
            layers=self._layer_health.troubled(thresholds) if progress.layers.names else None,
        )

    def _fold_norms(self, step: MergedStep) -> None:
        """Add the norms, and note disturbances that may set the loss back."""
        progress, thresholds = self.progress, self._thresholds
        reference = progress.losses.reference
        progress.norms.fold(step, thresholds, loss_risen=reference.risen_steps > 0)
        largest = max(progress.norms.exploded.values(), default=0.0)
        broken = step.gradient_nonfinite_elements > 0 and not step.skipped
        severe = broken or progress.learning.rate_jumped or largest > thresholds["grad_norm_high"]
        if severe or largest or progress.learning.rate_raised:
            reference.disturb(severe=severe)

    def _confirm_rate_jump(self, step: MergedStep) -> None:
        progress = self.progress
        broken = step.flag("loss_nonfinite") and not step.skipped
        trouble = broken or progress.losses.spiking or bool(progress.norms.exploded)
        if progress.learning.confirm(trouble=trouble):
            progress.losses.reference.disturb(severe=True)

    def _fold_loss_scale(self, step: MergedStep) -> None:
        progress, scale = self.progress, step.loss_scale
        if scale is None:
            return
        if progress.loss_scale_initial is None:
            progress.loss_scale_initial = scale
        if progress.loss_scale is not None and scale > progress.loss_scale:
            progress.loss_scale_consecutive_decreases = 0
        elif progress.loss_scale is not None and scale < progress.loss_scale:
            progress.loss_scale_consecutive_decreases += 1
        progress.loss_scale = scale
        if step.sequence >= self._thresholds["calibration_steps"]:
            progress.loss_scale_calibrated = _newer(progress.loss_scale_calibrated, scale)


def _newer(value: float | None, kept: float | None) -> float | None:
    return kept if value is None else value
