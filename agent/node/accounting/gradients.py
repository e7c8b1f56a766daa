"""Judges norms of gradients, second moments, layers without a gradient, and what goes on for long.

Finds layers whose gradients have outgrown Adam's second moments.
The root of the mean of g²/v is about 1 while v follows the gradients. After a shift of the data
or of the gradients' scale it rises for as long as v, with its slow average, stays behind.

Finds layers that the optimizer holds, that are trained, and that never got a gradient.
Frozen parameters are no layers, and which experts a step uses varies: both are left out. So are the
layers of an optimizer that has had none at all, while another one trains: a critic that waits.

Counts over how many steps every sample was beyond a limit: a single odd batch spans none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, inf, isfinite, log, sqrt

from mp_agent.catalog.metrics.distribution import fp16_low_headroom
from mp_agent.catalog.metrics.gradients import fp16_headroom, of_fp16
from mp_agent.catalog.metrics.optimizer import below_epsilon, lost_updates, moment_rms
from mp_agent.node.accounting.layer_health import NAMED_AT_MOST, may_be_idle
from mp_agent.node.accounting.learning import NO_GRADIENTS
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, ModelTracker, Tracker
from mp_agent.node.accounting.windows import MAIN, median, standard_deviation
from mp_agent.records.columns import DISTRIBUTION, GRADIENTS, OPTIMIZER
from mp_agent.records.health import LayersWithoutGradient, NormStanding, StaleMoments
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import LayerView

WINDOW_STEPS = 128
"""Number of norms whose median is the usual norm."""
FIRST_STEPS = 3
"""Number of norms below which there is no usual norm."""
ACCEPT_STEPS = 1024
"""Exploded steps after which their norms become the usual ones, unless the loss has risen."""
OPTIMIZERS_AT_MOST = 16
_UPDATE_STEPS = 8
"""Norms between two updates of the usual norm, after the first ones."""
_SCATTER_DEVIATIONS = 6.0
_SETTLED_STEPS = 32
"""Norms needed before their median can be the lowest usual one; of fewer it is low by chance."""
_UNKNOWN_SCATTER = 2.4
"""Assumed scatter, times the number of norms so far: 0.6 after four."""
_LARGE_FACTOR = 3.0
_FACTOR_MAX = 10.0
"""Upper bound on the factor by which wide scatter raises `grad_norm_growth`."""
_FORGET = log(1.002)
"""Increase of the lowest usual norm from update to update."""


@dataclass(slots=True, kw_only=True)
class NormHistory:
    """The norms of one optimizer's gradients. Plain data, stored in the ledger.

    window: logarithms of the last usual norms. lowest, highest: extremes of the medians so far;
    the lowest needs enough norms. refused: consecutive exploded norms that were left out.
    """

    window: list[float] = field(default_factory=list)
    center: float | None = None
    scatter: float = 0.0
    lowest: float | None = None
    highest: float | None = None
    refused: int = 0
    added: int = 0
    below: dict[str, int] = field(default_factory=dict)
    """Threshold → consecutive steps with a norm below it, steps that were not seen among them."""
    below_since: dict[str, int] = field(default_factory=dict)
    """Threshold → step, counted in the attempt, of the first of them."""

    @property
    def usual(self) -> float | None:
        """The usual norm; None until there is one."""
        return None if self.center is None else exp(self.center)

    @property
    def peak(self) -> float | None:
        """The largest norm that was usual at any time."""
        return None if self.highest is None else exp(self.highest)

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the last usual norms; None of too few, and beyond float64."""
        if len(self.window) < FIRST_STEPS:
            return None
        found = standard_deviation([exp(each) for each in self.window])
        return found if isfinite(found) else None

    def exploded(
        self, norm: float, thresholds: Mapping[str, float], *, multiplies: bool = False
    ) -> bool:
        """Return whether a norm is far above the usual one, or above the lowest usual one.

        Norms that scatter widely must grow more, and so must norms that are always large: the
        absolute bounds do not apply to them. multiplies: whether the loss does so from step to
        step, and the norm with it, so that neither has a lowest level.
        """
        if self.center is None or norm <= 0.0:
            return False
        usual = self.center
        if self.lowest is not None and not multiplies:
            usual = min(usual, self.lowest)
        growth, rise = thresholds["grad_norm_growth"], log(norm) - usual
        # What most norms of most runs are.
        if rise <= log(growth):
            return False
        if multiplies or self.center > log(thresholds["grad_norm_high"]):
            growth *= _LARGE_FACTOR
        # A few norms are a poor estimate of their scatter.
        scatter = max(self.scatter, _UNKNOWN_SCATTER / len(self.window))
        own_factor = exp(min(_SCATTER_DEVIATIONS * scatter, log(_FACTOR_MAX * growth)))
        return rise > log(max(growth, own_factor))

    def fold(self, norm: float, *, exploded: bool, loss_risen: bool) -> None:
        """Add a norm; exploded ones are left out until they have proved harmless."""
        if norm <= 0.0:
            return
        if exploded:
            self.refused += 1
            if loss_risen or self.refused < ACCEPT_STEPS:
                return
            self.lowest = None
        else:
            self.refused = 0
        self.window = [*self.window[1 - WINDOW_STEPS :], log(norm)]
        self.added += 1
        if len(self.window) < FIRST_STEPS or (
            self.added % _UPDATE_STEPS and self.added > _UPDATE_STEPS
        ):
            return
        self.center = median(self.window)
        # Differences of neighbours: a norm that grows steadily does not scatter.
        moves = [abs(after - before) for before, after in pairwise(self.window)]
        self.scatter = median(moves) / sqrt(2)
        self.highest = max(self.center, -inf if self.highest is None else self.highest)
        if len(self.window) >= _SETTLED_STEPS:
            lowest = inf if self.lowest is None else self.lowest + _FORGET
            self.lowest = min(self.center, lowest)

    def count_below(self, norm: float, sequence: int, thresholds: Mapping[str, float]) -> None:
        """Count consecutive steps below each of the low thresholds."""
        self.below_since = {
            name: self.below_since.get(name, sequence)
            for name in LOW_BOUNDS
            if norm < thresholds[name]
        }
        self.below = {
            name: sequence - self.below_since[name] + 1 if name in self.below_since else 0
            for name in LOW_BOUNDS
        }


LOW_BOUNDS = ("grad_norm_low", "grad_norm_very_low", "grad_norm_vanished")


@dataclass(slots=True, kw_only=True)
class NormTracker(ModelTracker):
    """Tracks the norms of a run, separately for each of its optimizers."""

    histories: dict[str, NormHistory] = field(default_factory=dict)
    exploded: dict[str, float] = field(default_factory=dict)
    """Optimizer whose norm exploded on the last step → that norm."""
    exploded_steps_ago: int | None = None
    """Judged steps since the last one that exploded; None before the first."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step. A norm that is that of a limit of clipping says nothing."""
        if context.progress.misreadings.clipped:
            self.histories, self.exploded, self.exploded_steps_ago = {}, {}, None
            return
        losses = context.progress.losses
        risen = losses.reference.risen_steps > 0
        self.fold(step, context.thresholds, loss_risen=risen, multiplies=losses.multiplies)

    def view(self) -> dict[str, NormStanding]:
        """Return what is usual of each optimizer's norm."""
        return {
            name: NormStanding(
                usual=own.usual, peak=own.peak, below=own.below, deviation=own.deviation
            )
            for name, own in self.histories.items()
        }

    def fold(
        self,
        step: MergedStep,
        thresholds: Mapping[str, float],
        *,
        loss_risen: bool,
        multiplies: bool = False,
    ) -> None:
        """Account for a closed step; keywords as of the history."""
        self.exploded = {}
        for name, norm in judged_norms(step):
            history = self.histories.get(name)
            if history is None:
                if len(self.histories) >= OPTIMIZERS_AT_MOST:
                    continue
                history = self.histories[name] = NormHistory()
            exploded = history.exploded(norm, thresholds, multiplies=multiplies)
            if exploded:
                self.exploded[name] = norm
            history.fold(norm, exploded=exploded, loss_risen=loss_risen)
            history.count_below(norm, step.sequence, thresholds)
        if self.exploded:
            self.exploded_steps_ago = 0
        elif self.exploded_steps_ago is not None:
            self.exploded_steps_ago += 1

    def history(self, name: str = MAIN) -> NormHistory | None:
        """Return the norms of one optimizer; None if none was judged."""
        return self.histories.get(name)


def judged_norms(step: MergedStep) -> Iterator[tuple[str, float]]:
    """Yield optimizer and norm of all gradients of a step whose norms count."""
    if step.gradients_judged and (squares := step.get("sum_squares")) is not None:
        yield MAIN, sqrt(squares)
    for name, own in step.optimizers.items():
        if own.judged and own.grad_norm is not None:
            yield name, own.grad_norm


ELEMENTS_AT_LEAST = 256
"""With fewer elements the mean of g²/v varies by itself."""


@dataclass(slots=True, kw_only=True)
class SecondMoments(Tracker):
    """The layers above the limit, and for how many samples in a row; the largest root of any."""

    above: dict[str, int] = field(default_factory=dict)
    """Samples in a row, by layer, the largest root first."""
    rms_max: float | None = None

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers of a sampled step; those that do not count leave all as it was."""
        if sample.layers.family.name != OPTIMIZER.name:
            return
        roots = {view.name: root for view in sample.views if (root := _root(view)) is not None}
        if not roots:
            return
        limit = context.thresholds["moment_rms_high"]
        self.rms_max = max(roots.values())
        high = sorted((name for name in roots if roots[name] > limit), key=lambda n: -roots[n])
        self.above = {name: self.above.get(name, 0) + 1 for name in high}

    def view(self, context: AccountContext) -> StaleMoments | None:
        """Return which layers are stale; None before any was sampled."""
        if self.rms_max is None:
            return None
        samples = context.thresholds["moment_rms_samples"]
        stale = [name for name, count in self.above.items() if count >= samples]
        return StaleMoments(
            rms_max=self.rms_max, stale=len(stale), stale_names=tuple(stale[:NAMED_AT_MOST])
        )


def _root(layer: LayerView) -> float | None:
    """Return a layer's root if it counts and has enough elements."""
    if not layer.judged or layer.values.get("active_elements", 0.0) < ELEMENTS_AT_LEAST:
        return None
    return moment_rms(layer.values)


_SAMPLES_AT_LEAST = 3


@dataclass(slots=True, kw_only=True)
class WithoutGradient(Tracker):
    """Tracks the layers of a run from sample to sample. Plain data, stored in the ledger."""

    steps: int = 0
    """Steps of the attempt."""
    samples: int = 0
    layers: int = 0
    """Number of trained layers in the last sample."""
    missing: int = 0
    """How many of them never had a gradient."""
    names: list[str] = field(default_factory=list)
    """Names of the first of them."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Count a closed step."""
        self.steps += 1

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers' gradients on a sampled step; one that lacks shards shows nothing."""
        if sample.layers.family is not GRADIENTS or not sample.layers.complete:
            return
        trained = list(_trained(sample))
        known = set(context.progress.layers.memory.names)
        idle = may_be_idle([view.name for view in trained], [_elements(view) for view in trained])
        missing = [
            view.name
            for index, view in enumerate(trained)
            if not _elements(view) and view.name not in known and index not in idle
        ]
        self.samples += 1
        self.layers, self.missing = len(trained), len(missing)
        self.names = missing[:NAMED_AT_MOST]

    def view(self, context: AccountContext) -> LayersWithoutGradient | None:
        """Return those layers; None before there were enough steps and samples."""
        if self.steps < context.thresholds["untrained_steps"]:
            return None
        if context.progress.learning.untrained.get(NO_GRADIENTS, 0) >= self.steps:
            return LayersWithoutGradient(share=1.0)
        if self.samples < _SAMPLES_AT_LEAST or not self.layers:
            return None
        return LayersWithoutGradient(share=self.missing / self.layers, names=tuple(self.names))


def _trained(sample: LayerObservation) -> Iterator[LayerView]:
    """Yield the layers of the optimizers that have any gradient."""
    optimizers = sample.layers.optimizers or ("",) * len(sample.views)
    pairs = list(zip(sample.views, optimizers, strict=True))
    active = {optimizer for view, optimizer in pairs if _elements(view)}
    return (view for view, optimizer in pairs if optimizer in active)


def _elements(view: LayerView) -> float:
    return view.values.get("elements", 0.0)


_AT_FLOOR_BITS = 0.0015
"""Distance from FP16's smallest number that is rounding."""


@dataclass(slots=True, kw_only=True)
class Sustained(Tracker):
    """The streaks of samples beyond a limit, by the threshold's name."""

    since: dict[str, int] = field(default_factory=dict)
    """Step, counted in the attempt, of the first sample of a streak."""
    steps: dict[str, int] = field(default_factory=dict)
    """Steps from there to its last sample; 0 without a streak."""
    rate: float | None = None
    """Learning rate of the last sample of updates."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, as far as it was sampled and counts."""
        limits = context.thresholds
        own = step.families.get(OPTIMIZER.name, {})
        if OPTIMIZER.has_sample(own) and step.counts(OPTIMIZER):
            rate, before = step.get("learning_rate"), self.rate
            rises = rate is not None and before is not None and rate > before
            lost, self.rate = None if rises else lost_updates(own), rate
            self._note("updates_lost", step.sequence, lost, limits)
            self._note("adam_below_epsilon", step.sequence, below_epsilon(own), limits)
        own = step.families.get(DISTRIBUTION.name, {})
        headroom = fp16_headroom(step)
        if DISTRIBUTION.has_sample(own) and step.counts(DISTRIBUTION) and headroom is not None:
            fits = headroom >= limits["fp16_headroom_bits"]
            flushed = 0.0 if fits else of_fp16("flushed_elements")(own)
            self._note("fp16_flushed", step.sequence, flushed, limits)

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers' gradients on a sampled step."""
        health = context.progress.layers.view(context)
        if sample.layers.family is not GRADIENTS or health is None:
            return
        share, judged = health.underflowing_share, context.progress.latest.judged
        self._note("underflow_layers", sample.sequence, share, context.thresholds)
        bits = None if judged is None else fp16_low_headroom(judged)
        at_floor = bool(share) and bits is not None and abs(bits) < _AT_FLOOR_BITS
        self._count("fp16_floor", sample.sequence, is_beyond=at_floor)

    def _note(
        self, limit: str, sequence: int, value: float | None, limits: Mapping[str, float]
    ) -> None:
        self._count(limit, sequence, is_beyond=value is not None and value > limits[limit])

    def _count(self, limit: str, sequence: int, *, is_beyond: bool) -> None:
        if is_beyond:
            self.steps[limit] = sequence - self.since.setdefault(limit, sequence)
        else:
            self.since.pop(limit, None)
            self.steps[limit] = 0
