"""The gradients of tensor collections: the union of the layers of each, at the last sample."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import DISTRIBUTION, GRADIENTS, ColumnFamily
from mp_agent.records.tensor_collections import TensorCollection, members_of
from mp_agent.records.views import CollectionView, LayerView

log = logging.getLogger("mp_agent.node")

_FAMILIES = (GRADIENTS.name, DISTRIBUTION.name)


@dataclass(slots=True, kw_only=True)
class CollectionTracker(Tracker):
    """The columns of each collection, of the last sample of which all that was measured counts."""

    views: dict[str, CollectionView] = field(default_factory=dict)
    """By name, in the order of the definitions."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers of a sampled step, if collections are made of this family."""
        if sample.layers.family.name not in _FAMILIES:
            return
        before, self.views = self.views, {}
        for collection in sample.collections:
            known = before.get(collection.name)
            view = self.views[collection.name] = _after(known, collection, sample)
            if not view.layers and (known is None or known.layers):
                log.warning("mp_agent does not measure this: %s", feature_of(collection.name))

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return them by name."""
        return {"collections": self.views}

    @property
    def unmatched(self) -> tuple[str, ...]:
        """What is not measured, in words, since no layer is in it."""
        return tuple(feature_of(name) for name, view in self.views.items() if not view.layers)


def feature_of(name: str) -> str:
    """Return in words that a collection is not measured."""
    return f"collection {name!r}, which matches no parameter"


def _after(
    known: CollectionView | None, collection: TensorCollection, sample: LayerObservation
) -> CollectionView:
    """Return a collection after a sample: one that does not count leaves its columns as they are.

    Layers of which nothing was measured, such as those of another optimizer, are left out.
    """
    view, family = known or CollectionView(), sample.layers.family
    members = [sample.views[i] for i in members_of(collection.patterns, sample.layers.names)]
    if family is GRADIENTS:
        nonfinite = sum(family.nonfinite_elements(layer.values) for layer in members)
        view = replace(view, layers=len(members), nonfinite_elements=nonfinite)
    measured = [layer for layer in members if layer.values.get(family.size)]
    if measured and all(layer.judged for layer in measured):
        values = _united(measured, family)
        if all(column in values for column in family.required):
            view = replace(view, families={**view.families, family.name: values})
    return view


def _united(layers: Sequence[LayerView], family: ColumnFamily) -> dict[str, float]:
    return family.merged(
        [[layer.values.get(name, nan) for name in family.names] for layer in layers]
    )
