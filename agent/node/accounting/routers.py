"""Finds routers that send most tokens to few experts, and are sure of it.

A load that is uneven alone may be the data's, and a small entropy that of a router that has learned
to decide; together, and for some samples, they are a router that has collapsed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mp_agent.catalog.metrics.routers.quantities import entropy, unused_experts
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import ROUTERS
from mp_agent.records.health import RouterBalance
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import LayerView

NAMED_AT_MOST = 10


@dataclass(slots=True, kw_only=True)
class RouterTracker(Tracker):
    """The routers beyond both limits, and for how many samples in a row; the worst of the last."""

    beyond: dict[str, int] = field(default_factory=dict)
    """Samples in a row, by name, the largest load first."""
    entropy_min: float | None = None
    unused_max: float | None = None
    sampled: bool = False

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Do nothing: only layers are looked at."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the routers of a sampled step; those that do not count leave all as it was."""
        if sample.layers.family.name != ROUTERS.name:
            return
        views = [view for view in sample.views if view.judged]
        if not views:
            return
        found = [_Router.of(view) for view in views]
        self.sampled = True
        self.entropy_min = min(
            (one.entropy for one in found if one.entropy is not None), default=None
        )
        self.unused_max = max((one.unused for one in found if one.unused is not None), default=None)
        low, high = context.thresholds["router_entropy_low"], context.thresholds["router_load_high"]
        uneven = [
            one
            for one in found
            if one.entropy is not None and one.entropy < low and one.load > high
        ]
        uneven.sort(key=lambda one: -one.load)
        self.beyond = {one.name: self.beyond.get(one.name, 0) + 1 for one in uneven}

    def health(self, context: AccountContext) -> Mapping[str, Any]:
        """Return which routers have collapsed; None before any was sampled."""
        if not self.sampled:
            return {"routers": None}
        samples = context.thresholds["router_collapse_samples"]
        collapsed = [name for name, count in self.beyond.items() if count >= samples]
        found = RouterBalance(
            entropy_min=self.entropy_min,
            unused_max=self.unused_max,
            collapsed=len(collapsed),
            collapsed_names=tuple(collapsed[:NAMED_AT_MOST]),
        )
        return {"routers": found}


@dataclass(frozen=True, slots=True)
class _Router:
    name: str
    load: float
    entropy: float | None
    unused: float | None

    @classmethod
    def of(cls, view: LayerView) -> "_Router":
        values = view.values
        return cls(view.name, values.get("load_max", 0.0), entropy(values), unused_experts(values))
