"""The values of a run that were observed last, and those of the last step that counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import FAMILIES, GRADIENTS, LOWEST_LEARNING_RATE, ColumnFamily
from mp_agent.records.health import LatestValues
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
