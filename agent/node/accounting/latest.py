"""The values of a run that were observed last, and what the last looks at parameters found."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import (
    CUT_OFF_PARAMETERS,
    FAMILIES,
    GRADIENTS,
    LOWEST_LEARNING_RATE,
    NOTHING_LOADED,
    PARTED_PARAMETERS,
    RESUMED_WITHOUT_STATE,
    ROUNDED_RATIO,
    ROUNDING_LOSS,
    SCHEDULE_BEHIND,
    UNCHANGED_PARAMETERS,
    UNHELD_PARAMETERS,
    ColumnFamily,
)
from mp_agent.records.health import LatestValues, TrainedParameters
from mp_agent.records.merged import MergedStep, OptimizerStep
from mp_agent.records.views import DivergenceView, OptimizerView

_LOSS_SEEN_BY = 64
"""Steps by which a run whose loss can be seen has shown one."""
UNSEEN_LOSS = "the loss, which no step of the run has shown"


@dataclass(slots=True, kw_only=True)
class LatestStep(Tracker):
    """The last step, the last one whose norms count, and the last finite loss and learning rate.

    What is not measured on every step keeps its last value: gauges do not vanish between samples.
    Of which step a value is, and whether there were only NaN and Inf since, is kept with it.
    """

    last: MergedStep | None = None
    judged: MergedStep | None = None
    """The step with the last values of sampled columns that it did not measure."""
    families: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """The same of each family, of the last step on which it counts."""
    sampled_steps: dict[str, int] = field(default_factory=dict)
    """The trainer's step of which those sampled values, or the layers, are; by family."""
    loss: float | None = None
    learning_rate: float | None = None
    value_steps: dict[str, int] = field(default_factory=dict)
    """The trainer's step of which loss, loss scale and learning rate are."""
    nonfinite_since: dict[str, int] = field(default_factory=dict)
    """`loss` and `gradients`, while they are NaN or Inf, to the first step on which they were."""
    layer_interval_shortest_steps: int | None = None

    @property
    def loss_is_unseen(self) -> bool:
        """Whether no step of the run has had a loss, of as many as show one."""
        known = self.loss is not None or "loss" in self.nonfinite_since
        return not known and self.last is not None and self.last.sequence >= _LOSS_SEEN_BY

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        # What each rank had is compared as it comes in: it would fill the ledger of a large run.
        step = replace(step, compute_seconds={}, losses={})
        self.last = step
        broken = step.flag("loss_nonfinite")
        loss = None if broken else step.get("loss")
        rate = step.get("learning_rate")
        self.loss = _newer(loss, self.loss)
        self.learning_rate = _newer(rate, self.learning_rate)
        values = (("loss", loss), ("learning_rate", rate), ("loss_scale", step.loss_scale))
        self.value_steps |= {name: step.step for name, value in values if value is not None}
        if broken or loss is not None:
            self._note_nonfinite("loss", step.step, nonfinite=broken)
        if GRADIENTS.nonfinite[0] in step.gradients:
            nonfinite = step.gradient_nonfinite_elements > 0
            self._note_nonfinite("gradients", step.step, nonfinite=nonfinite)
        if (interval := step.get("layer_interval_steps")) is not None:
            shortest = self.layer_interval_shortest_steps
            self.layer_interval_shortest_steps = min(int(interval), shortest or int(interval))
        for family in FAMILIES:
            if family.name in step.complete and step.counts(family):
                self._add(family, step)

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Note on which step the layers were measured, unless no norm of it counts."""
        if any(view.judged for view in sample.views):
            self._note_sample(sample.layers.family, sample.step)

    def view(self, context: AccountContext) -> LatestValues:
        """Return the values as they are, without a loss that is not the script's."""
        return LatestValues(
            step=self.last,
            judged=self.judged,
            families=dict(self.families),
            sampled_steps=self.sampled_steps,
            loss=None if context.progress.misreadings.scaled else self.loss,
            learning_rate=self.learning_rate,
            value_steps=dict(self.value_steps),
            nonfinite_since=dict(self.nonfinite_since),
            layer_interval_shortest_steps=self.layer_interval_shortest_steps,
        )

    def _add(self, family: ColumnFamily, step: MergedStep) -> None:
        own = step.families[family.name]
        values = family.with_last_sample(own, self.families.get(family.name, {}))
        self.families[family.name] = values
        if family.has_sample(own):
            self._note_sample(family, step.step)
        if family is GRADIENTS:
            if values is not own:
                step = replace(step, families={**step.families, family.name: values})
            self.judged = step

    def _note_nonfinite(self, name: str, step: int, *, nonfinite: bool) -> None:
        if nonfinite:
            self.nonfinite_since.setdefault(name, step)
        else:
            self.nonfinite_since.pop(name, None)

    def _note_sample(self, family: ColumnFamily, step: int) -> None:
        self.sampled_steps = {**self.sampled_steps, family.name: step}


@dataclass(slots=True, kw_only=True)
class OptimizerTracker(Tracker):
    """The optimizers, where there are several; each keeps its last step whose norms count."""

    views: dict[str, OptimizerView] = field(default_factory=dict)
    """By name."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step; optimizers that no rank holds any more are dropped."""
        views = {name: view for name, view in self.views.items() if name in step.optimizers_held}
        for name, own in step.optimizers.items():
            before = views[name].judged if name in views else None
            judged = _with_last_sample(own, before) if own.judged else before
            views[name] = OptimizerView(last=own, judged=judged)
        self.views = views


@dataclass(slots=True, kw_only=True)
class ReplicaTracker(Tracker):
    """The last comparison of replicas, of each kind."""

    views: dict[str, DivergenceView] = field(default_factory=dict)
    """By kind."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        lowest, highest = step.get(LOWEST_LEARNING_RATE), step.get("learning_rate")
        known = lowest is not None and highest is not None and lowest != highest
        rates = (lowest or 0.0, highest or 0.0) if known else None
        found = {
            kind: DivergenceView(
                agree=own.agree,
                step=step.step,
                minority_ranks=own.minority_ranks,
                tensors=own.tensors,
                unjudged=own.unjudged,
                local=own.local,
                rates=None if own.agree else rates,
            )
            for kind, own in step.replicas.items()
        }
        outdated = frozenset() if step.reduction is None else step.reduction.withheld
        kept = {kind: own for kind, own in self.views.items() if kind not in outdated}
        self.views = {**kept, **found}


def _with_last_sample(own: OptimizerStep, before: OptimizerStep | None) -> OptimizerStep:
    known = {} if before is None else before.gradients
    values = GRADIENTS.with_last_sample(own.gradients, known)
    if values is own.gradients:
        return own
    return replace(own, families={**own.families, GRADIENTS.name: values})


def _newer(value: float | None, kept: float | None) -> float | None:
    return kept if value is None else value


_SETTLED_SHARE = 0.3
"""Share of its highest value that the learning rate has where a schedule does not explain that
updates are rounded away."""
_RISING = 1.05
_SHOWN_STEPS = 1000
"""Steps for which it is shown how a run has begun: Adam's second moment, at a beta of 0.999, has
been made again by then."""
_OF_BEGINNINGS = (RESUMED_WITHOUT_STATE, SCHEDULE_BEHIND, NOTHING_LOADED)


@dataclass(slots=True, kw_only=True)
class ParameterTracker(Tracker):
    """What the last looks at parameters have found; between looks steps say nothing of it."""

    unheld: float | None = None
    unchanged: float | None = None
    cut_off: float | None = None
    parted: float | None = None
    rounded_ratio: float | None = None
    rounding_losses: tuple[float, ...] = ()
    """Of the last two comparisons in a row."""
    rate: float | None = None
    """Learning rate of the last step on which weights were compared, at first of the first step."""
    of_beginnings: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By column that only steps after a beginning have, its last value, and steps since then."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step, if anything was looked at."""
        self.unheld = step.columns.get(UNHELD_PARAMETERS, self.unheld)
        self.cut_off = step.columns.get(CUT_OFF_PARAMETERS, self.cut_off)
        self.parted = step.columns.get(PARTED_PARAMETERS, self.parted)
        self.of_beginnings = {
            name: (value, steps + 1)
            for name, (value, steps) in self.of_beginnings.items()
            if steps < _SHOWN_STEPS
        } | {name: (found, 0) for name in _OF_BEGINNINGS if (found := step.columns.get(name))}
        rate = step.get("learning_rate")
        if UNCHANGED_PARAMETERS in step.columns:
            self.unchanged = step.columns[UNCHANGED_PARAMETERS]
            settled = _is_settled(rate, self.rate, context.progress.learning.highest_rate)
            self.rounded_ratio = step.columns.get(ROUNDED_RATIO) if settled else None
            loss = step.columns.get(ROUNDING_LOSS) if settled else None
            self.rounding_losses = () if loss is None else (*self.rounding_losses[-1:], loss)
            self.rate = rate
        elif self.rate is None:
            self.rate = rate

    def view(self) -> TrainedParameters:
        """Return what was found last."""
        return TrainedParameters(
            unheld=self.unheld,
            unchanged=self.unchanged,
            cut_off=self.cut_off,
            parted=self.parted,
            rounded_ratio=self.rounded_ratio,
            rounding_loss=min(self.rounding_losses) if len(self.rounding_losses) > 1 else None,
            **{name: value for name, (value, _) in self.of_beginnings.items()},
        )


def _is_settled(rate: float | None, before: float | None, highest: float) -> bool:
    """Return whether a learning rate neither rises nor has almost decayed."""
    if rate is None or before is None:
        return False
    return 0.0 < rate <= _RISING * before and rate >= _SETTLED_SHARE * highest
