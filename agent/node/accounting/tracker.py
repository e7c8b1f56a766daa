"""What a metric remembers from step to step: the interface of its state.

A tracker is a dataclass of plain data, declared as a field of `progress.Progress`. From there the
account observes steps and layers with it, and the ledger stores it. What it shows of the run is its
own `view`, which `Progress.view` puts into the `RunView`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.baseline import Baseline
from mp_agent.records.merged import MergedStep
from mp_agent.records.tensor_collections import TensorCollection
from mp_agent.records.views import LayerView

if TYPE_CHECKING:
    from mp_agent.node.accounting.progress import Progress

T = TypeVar("T", bound="Tracker")


@dataclass(frozen=True, slots=True)
class AccountContext:
    """What trackers compare with."""

    thresholds: Mapping[str, float]
    window_seconds: float
    """Length of the windows whose extremes are exported."""
    progress: "Progress"
    """All trackers; those declared earlier have observed the step."""
    baseline: Baseline | None = None
    """What good runs looked like, where the job names such a file."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerObservation:
    """The layers of a sampled step, of one family."""

    sequence: int
    step: int
    """The step in the trainer's own count."""
    layers: MergedLayers
    views: Sequence[LayerView]
    collections: Sequence[TensorCollection] = ()
    """Those that the script has defined."""


class Tracker:
    """State that a metric keeps from step to step. Every method may be left out."""

    __slots__ = ()

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step; each comes exactly once, in order."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers of a sampled step, of one family; the step itself came before."""

    def next_attempt(self: T) -> T:
        """Return the state with which the run's next attempt starts."""
        return type(self)()

    def next_model(self: T) -> T:
        """Return the state with which the run goes on where it begins to train another model."""
        return self


class ModelTracker(Tracker):
    """State that compares a model with its own past. Another model begins without any."""

    __slots__ = ()

    def next_model(self: T) -> T:
        """Return the state of a run that begins."""
        return type(self)()
