"""Finds layers whose gradients have outgrown Adam's second moments.

The root of the mean of g²/v is about 1 while v follows the gradients. After a shift of the data
or of the gradients' scale it rises for as long as v, with its slow average, stays behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mp_agent.catalog.metrics.optimizer.quantities import moment_rms
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import OPTIMIZER
from mp_agent.records.health import StaleMoments
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import LayerView

ELEMENTS_AT_LEAST = 256
"""With fewer elements the mean of g²/v varies by itself."""
NAMED_AT_MOST = 10


@dataclass(slots=True, kw_only=True)
class SecondMoments(Tracker):
    """The layers above the limit, and for how many samples in a row; the largest root of any."""

    above: dict[str, int] = field(default_factory=dict)
    """Samples in a row, by layer, the largest root first."""
    rms_max: float | None = None

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Do nothing: only layers are looked at."""

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

    def health(self, context: AccountContext) -> Mapping[str, Any]:
        """Return which layers are stale; None before any was sampled."""
        if self.rms_max is None:
            return {"moments": None}
        samples = context.thresholds["moment_rms_samples"]
        stale = [name for name, count in self.above.items() if count >= samples]
        found = StaleMoments(
            rms_max=self.rms_max, stale=len(stale), stale_names=tuple(stale[:NAMED_AT_MOST])
        )
        return {"moments": found}


def _root(layer: LayerView) -> float | None:
    """Return a layer's root if it counts and has enough elements."""
    if not layer.judged or layer.values.get("active_elements", 0.0) < ELEMENTS_AT_LEAST:
        return None
    return moment_rms(layer.values)
