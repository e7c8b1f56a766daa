"""The first values that were not finite: where, on which rank, in which step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import ACTIVATIONS, GRADIENTS
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import (
    FirstNonfinite,
    FirstNonfiniteGradient,
    FirstNonfiniteOutput,
    LayerView,
)


@dataclass(slots=True, kw_only=True)
class NonfiniteOutputTracker(Tracker):
    """Where outputs of modules stopped being finite: at the first sample after a finite one."""

    first: FirstNonfiniteOutput | None = None
    going_on: bool = False
    """The last sample had non-finite outputs."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Find the module, if the sample before had none."""
        if sample.layers.family.name != ACTIVATIONS.name:
            return
        layer = first_nonfinite_layer(sample.views)
        if layer and not self.going_on:
            self.first = FirstNonfiniteOutput(step=sample.step, layer=layer)
        self.going_on = bool(layer)


@dataclass(slots=True, kw_only=True)
class NonfiniteGradientTracker(Tracker):
    """Where in backward gradients stopped being finite: at the first sample after a finite one.

    A loss scale that is too high does that as well; then a scaler skips the step.
    """

    first: FirstNonfiniteGradient | None = None
    going_on: bool = False
    """The last sample had non-finite gradients that arose in backward."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Find the place, unless the sample before had one, or the forward pass was not finite."""
        if sample.layers.family.name != ACTIVATIONS.name:
            return
        last = context.progress.last
        lost = last is not None and last.step == sample.step and last.flag("loss_nonfinite")
        found = None if lost else first_nonfinite_gradient(sample.step, sample.views)
        if found is not None and not self.going_on:
            self.first = found
        self.going_on = found is not None


def first_nonfinite_layer(views: Sequence[LayerView]) -> str:
    """Return the module whose output was non-finite in the earliest call; "" if there is none."""
    return _earliest(views, "nonfinite_call")[1]


def first_nonfinite_gradient(
    step: int, views: Sequence[LayerView]
) -> FirstNonfiniteGradient | None:
    """Return where a NaN or Inf arose in backward; None if it did not, or already in forward.

    Of several modules that have the same input, the first of the tree is named.
    """
    after, maker = _earliest(views, "nonfinite_gradient_call")
    within, module = _earliest(views, "nonfinite_backward_call")
    if first_nonfinite_layer(views) or not isfinite(min(after, within)):
        return None
    if within <= after:
        return FirstNonfiniteGradient(step=step, layer=module, place="within")
    return FirstNonfiniteGradient(step=step, layer=maker, place="after")


def _earliest(views: Sequence[LayerView], column: str) -> tuple[float, str]:
    """Return the smallest number of a column, and the first module that has it; else Inf, ""."""
    found = [(view.values[column], view.name) for view in views if column in view.values]
    return min(found, key=lambda each: each[0], default=(inf, ""))


HEALTHY_STEPS = 100
"""Finite steps after which the next non-finite value starts a new incident."""
TOLERATED_SKIPS = 2
"""Consecutive skipped steps with a non-finite loss that are routine: an overflow in forward."""


@dataclass(slots=True, kw_only=True)
class IncidentTracker(Tracker):
    """Tracks where a run's latest incident began.

    An overflow that GradScaler skips is no incident. A non-finite loss on skipped steps becomes one
    if it persists; it then began with the first of those steps.
    """

    first: FirstNonfinite | None = None
    first_sequence: int = 0
    unattributed: bool = False
    """The incident began in backward, on a step of which no own gradients are known."""
    clean_steps: int = 0
    suspect: FirstNonfinite | None = None
    """The first of the consecutive skipped steps with a non-finite loss."""
    suspect_sequence: int = 0
    suspect_steps: int = 0

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        self.fold(step)

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Note the layer, if the gradients or outputs of the incident's first step show it."""
        if sample.layers.family is ACTIVATIONS:
            self._observe_outputs(sample)
        if sample.layers.family is not GRADIENTS:
            return
        if nearest_output := sample.layers.nonfinite_nearest_output():
            self.set_layer(sample.sequence, nearest_output)

    def fold(self, step: MergedStep) -> None:
        """Account for a closed step."""
        loss_nonfinite = step.flag("loss_nonfinite")
        if step.weights_kept and loss_nonfinite:
            self._suspect(step)
        elif step.skipped:
            self.suspect_steps = 0
        elif loss_nonfinite or step.gradient_nonfinite_elements > 0 or step.gradients_replaced:
            self.suspect_steps = 0
            self._begin(_first_seen(step), step.sequence)
            self._attribute(step)
        else:
            self.suspect_steps = 0
            self.clean_steps += 1

    def set_layer(self, sequence: int, layer: str, *, phase: str = "backward") -> None:
        """Set the layer of the incident's first step, which is known a little after the step.

        Gradients show only the layer of a value that arose in backward: a non-finite loss affects
        all of them. Where a value arose in forward, outputs of modules show it.
        """
        if self.first and self.first_sequence == sequence and self.first.phase == phase:
            self.first = replace(self.first, layer=layer)

    def _observe_outputs(self, sample: LayerObservation) -> None:
        if layer := first_nonfinite_layer(sample.views):
            self.set_layer(sample.sequence, layer, phase="forward")
        born = first_nonfinite_gradient(sample.step, sample.views)
        if self.first and born is not None and born.place == "within":
            names = sample.layers.names
            module = self.first.layer.rpartition(".")[0]
            # A weight of a module nearer the output got its gradient before.
            if module not in names or names.index(module) <= names.index(born.layer):
                self.set_layer(sample.sequence, born.layer)

    def _suspect(self, step: MergedStep) -> None:
        if self.suspect_steps == 0:
            self.suspect, self.suspect_sequence = _first_seen(step), step.sequence
        self.suspect_steps += 1
        # A search for the loss scale explains what GradScaler skips, not what the guard does.
        tolerated = 0 if step.skipped_by_guard else TOLERATED_SKIPS
        if self.suspect is not None and self.suspect_steps > tolerated:
            self._begin(self.suspect, self.suspect_sequence)

    def _begin(self, first: FirstNonfinite, sequence: int) -> None:
        if self.first is None or self.clean_steps >= HEALTHY_STEPS:
            self.first, self.first_sequence = first, sequence
            self.unattributed = first.phase == "backward"
        self.clean_steps = 0

    def _attribute(self, step: MergedStep) -> None:
        """Name the ranks of the first step of the incident on which they are known.

        Those of a step with a non-finite loss may have it from the weights.
        """
        known = step.nonfinite_gradient_ranks and not step.flag("loss_nonfinite")
        if self.unattributed and self.first is not None and known:
            self.unattributed = False
            self.first = replace(self.first, rank=_blamed_ranks(step))


def _first_seen(step: MergedStep) -> FirstNonfinite:
    return FirstNonfinite(
        step=step.step,
        rank=_blamed_ranks(step),
        layer="",
        phase="forward" if step.flag("loss_nonfinite") else "backward",
    )


def _blamed_ranks(step: MergedStep) -> str:
    """Return the ranks whose own loss was not finite; "" if none, or all ranks, were.

    Where no loss was, those whose own gradients were not before they were reduced.
    """
    blamed = step.nonfinite_loss_ranks
    if not step.flag("loss_nonfinite"):
        blamed = step.nonfinite_gradient_ranks
    everyone = len(blamed) == len(step.present_ranks) and step.world_size > 1
    return "" if everyone else ",".join(map(str, blamed))
