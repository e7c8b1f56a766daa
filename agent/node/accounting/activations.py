"""The first module of a forward pass with a non-finite output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import ACTIVATIONS
from mp_agent.records.views import FirstNonfiniteOutput, LayerView


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


def first_nonfinite_layer(views: Sequence[LayerView]) -> str:
    """Return the module whose output was non-finite in the earliest call; "" if there is none."""
    found = [
        (view.values["nonfinite_call"], view.name)
        for view in views
        if view.values.get("nonfinite_call", inf) < inf
    ]
    return min(found, default=(0.0, ""))[1]
