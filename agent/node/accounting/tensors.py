"""The tensors that the script watches, as of their last sample."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import TENSORS
from mp_agent.records.views import LayerView

NAMES_AT_MOST = 64
"""Names that have series. A process watches no more, but ranks may watch different ones."""
_NAMES_KNOWN_AT_MOST = 10_000


@dataclass(slots=True, kw_only=True)
class TensorTracker(Tracker):
    """The columns of each tensor, of the last sample of which all ranks are there.

    Of tensors that only some ranks watch, as in a pipeline, the last sample of any.
    """

    rows: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """By name, in the order in which they came."""
    whole: dict[str, bool] = field(default_factory=dict)
    """Of each, whether all ranks were there."""
    beyond: dict[str, bool] = field(default_factory=dict)
    """The names that have no series, since there are too many."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the tensors of a sampled step."""
        if sample.layers.family.name == TENSORS.name:
            for view in sample.views:
                self._add(view)

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return the columns by name, and how many names there are."""
        return {"tensors": dict(self.rows), "tensor_names": len(self.rows) + len(self.beyond)}

    def _add(self, view: LayerView) -> None:
        if not view.values.get("elements"):
            return
        if view.name not in self.rows and len(self.rows) >= NAMES_AT_MOST:
            if len(self.beyond) < _NAMES_KNOWN_AT_MOST:
                self.beyond[view.name] = True
        elif view.judged or not self.whole.get(view.name, False):
            self.rows[view.name], self.whole[view.name] = view.values, view.judged
