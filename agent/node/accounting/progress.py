"""All that metrics remember of a run from step to step, other than counters."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from mp_agent.node.accounting.gradients import NormTracker, SecondMoments, WithoutGradient
from mp_agent.node.accounting.incidents import (
    IncidentTracker,
    NonfiniteGradientTracker,
    NonfiniteOutputTracker,
)
from mp_agent.node.accounting.instruments import (
    CollectionTracker,
    Fp8ScaleTracker,
    LogitTracker,
    RouterTracker,
    TensorTracker,
)
from mp_agent.node.accounting.latest import LatestStep, OptimizerTracker, ReplicaTracker
from mp_agent.node.accounting.layer_health import LayerHealth
from mp_agent.node.accounting.learning import LearningTracker
from mp_agent.node.accounting.loss import LossTracker
from mp_agent.node.accounting.loss_scale import FloorSkips, LossScaleTracker, Misreadings
from mp_agent.node.accounting.ranks import Pace, ReductionTracker, StragglerTracker
from mp_agent.node.accounting.tracker import Tracker
from mp_agent.node.accounting.windows import NormWindows
from mp_agent.records.merged import MergedStep


@dataclass(slots=True, kw_only=True)
class Progress:
    """The trackers of a run, in the order in which they observe a step. Stored in the ledger.

    A stateful metric is a `Tracker` and a line here; nothing else names it on its way from the
    step to the view that the metric reads, or to the ledger and back.
    """

    incident: IncidentTracker = field(default_factory=IncidentTracker)
    learning: LearningTracker = field(default_factory=LearningTracker)
    misreadings: Misreadings = field(default_factory=Misreadings)
    norms: NormTracker = field(default_factory=NormTracker)
    losses: LossTracker = field(default_factory=LossTracker)
    floor: FloorSkips = field(default_factory=FloorSkips)
    pace: Pace = field(default_factory=Pace)
    loss_scale: LossScaleTracker = field(default_factory=LossScaleTracker)
    stragglers: StragglerTracker = field(default_factory=StragglerTracker)
    optimizers: OptimizerTracker = field(default_factory=OptimizerTracker)
    replicas: ReplicaTracker = field(default_factory=ReplicaTracker)
    reduction: ReductionTracker = field(default_factory=ReductionTracker)
    latest: LatestStep = field(default_factory=LatestStep)
    windows: NormWindows = field(default_factory=NormWindows)
    layers: LayerHealth = field(default_factory=LayerHealth)
    without_gradient: WithoutGradient = field(default_factory=WithoutGradient)
    moments: SecondMoments = field(default_factory=SecondMoments)
    outputs: NonfiniteOutputTracker = field(default_factory=NonfiniteOutputTracker)
    backward: NonfiniteGradientTracker = field(default_factory=NonfiniteGradientTracker)
    logits: LogitTracker = field(default_factory=LogitTracker)
    routers: RouterTracker = field(default_factory=RouterTracker)
    fp8: Fp8ScaleTracker = field(default_factory=Fp8ScaleTracker)
    tensors: TensorTracker = field(default_factory=TensorTracker)
    collections: CollectionTracker = field(default_factory=CollectionTracker)

    @property
    def trackers(self) -> Iterator[Tracker]:
        """All of them."""
        return (getattr(self, declared.name) for declared in fields(self))

    @property
    def last(self) -> MergedStep | None:
        """The last closed step."""
        return self.latest.last

    def next_attempt(self) -> "Progress":
        """Return the state with which the run's next attempt starts."""
        return type(self)(
            **{one.name: getattr(self, one.name).next_attempt() for one in fields(self)}
        )
