"""Finds layers in FP8 whose scales do not fit their tensors, sample after sample.

Delayed scaling casts with the amax of earlier passes: an amax at the format's largest number is
what it aims at, and one beyond it for a pass is what it is designed to bear. A scale that is
wrong by far in several samples does not follow its tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import FP8
from mp_agent.records.health import Fp8Scaling
from mp_agent.records.merged import MergedStep

NAMED_AT_MOST = 10


@dataclass(slots=True, kw_only=True)
class Fp8ScaleTracker(Tracker):
    """The layers beyond each limit, and for how many samples in a row.

    Layers without delayed scaling have no such numbers and are never among them.
    """

    saturated: dict[str, int] = field(default_factory=dict)
    """Samples in a row, by name, the largest range first."""
    unused: dict[str, int] = field(default_factory=dict)
    """Samples in a row, by name, the smallest range first."""
    sampled: bool = False

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Do nothing: only layers are looked at."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers of a sampled step; those that do not count leave all as it was."""
        if sample.layers.family.name != FP8.name:
            return
        rows = [
            (view.name, view.values["range_used_max"], view.values["range_used_min"])
            for view in sample.views
            if view.judged and view.values.keys() >= {"range_used_max", "range_used_min"}
        ]
        if not rows:
            return
        self.sampled = True
        high, low = (context.thresholds[f"fp8_range_used_{side}"] for side in ("high", "low"))
        beyond = sorted((-largest, name) for name, largest, _ in rows if largest > high)
        below = sorted((smallest, name) for name, _, smallest in rows if smallest < low)
        self.saturated = {name: self.saturated.get(name, 0) + 1 for _, name in beyond}
        self.unused = {name: self.unused.get(name, 0) + 1 for _, name in below}

    def health(self, context: AccountContext) -> Mapping[str, Any]:
        """Return which layers are misscaled; None before any was sampled."""
        if not self.sampled:
            return {"fp8": None}
        samples = context.thresholds["fp8_scaling_samples"]
        saturated = [name for name, count in self.saturated.items() if count >= samples]
        unused = [name for name, count in self.unused.items() if count >= samples]
        found = Fp8Scaling(
            misscaled=len({*saturated, *unused}),
            saturated_names=tuple(saturated[:NAMED_AT_MOST]),
            unused_names=tuple(unused[:NAMED_AT_MOST]),
        )
        return {"fp8": found}
