"""Finds layers that the optimizer holds, that are trained, and that never got a gradient.

Frozen parameters are no layers, and which experts a step uses varies: both are left out. So are the
layers of an optimizer that has had none at all, while another one trains: a critic that waits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mp_agent.node.accounting.gradients.layer_health import NAMED_AT_MOST, may_be_idle
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.node.accounting.training.learning import NO_GRADIENTS
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.health import LayersWithoutGradient
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import LayerView

_SAMPLES_AT_LEAST = 3


@dataclass(slots=True, kw_only=True)
class WithoutGradient(Tracker):
    """Tracks the layers of a run from sample to sample. Plain data, stored in the ledger."""

    steps: int = 0
    """Of the attempt."""
    samples: int = 0
    layers: int = 0
    """Number of trained layers in the last sample."""
    missing: int = 0
    """How many of them never had a gradient."""
    names: list[str] = field(default_factory=list)
    """Of these, the first ones."""

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

    def health(self, context: AccountContext) -> Mapping[str, Any]:
        """Return those layers; None before there were enough steps and samples."""
        enough = self.steps >= context.thresholds["untrained_steps"]
        found = None
        if enough and context.progress.learning.untrained.get(NO_GRADIENTS, 0) >= self.steps:
            found = LayersWithoutGradient(share=1.0)
        elif enough and self.samples >= _SAMPLES_AT_LEAST and self.layers:
            share = self.missing / self.layers
            found = LayersWithoutGradient(share=share, names=tuple(self.names))
        return {"without_gradient": found}


def _trained(sample: LayerObservation) -> Iterator[LayerView]:
    """Yield the layers of the optimizers that have any gradient."""
    optimizers = sample.layers.optimizers or ("",) * len(sample.views)
    pairs = list(zip(sample.views, optimizers, strict=True))
    active = {optimizer for view, optimizer in pairs if _elements(view)}
    return (view for view, optimizer in pairs if optimizer in active)


def _elements(view: LayerView) -> float:
    return view.values.get("elements", 0.0)
