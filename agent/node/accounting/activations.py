"""The first module of a forward pass, and of a backward pass, that is not finite."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import ACTIVATIONS
from mp_agent.records.views import FirstNonfiniteGradient, FirstNonfiniteOutput, LayerView


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

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return what was found last."""
        return {"first_nonfinite_output": self.first}


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

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return what was found last."""
        return {"first_nonfinite_gradient": self.first}


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
