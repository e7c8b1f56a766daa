"""All that metrics remember of a run from step to step, other than counters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from mp_agent.node.accounting.baseline import BaselineTracker
from mp_agent.node.accounting.batches import BatchTracker
from mp_agent.node.accounting.gradients import (
    NormTracker,
    SecondMoments,
    Sustained,
    WithoutGradient,
)
from mp_agent.node.accounting.incidents import (
    IncidentTracker,
    NonfiniteGradientTracker,
    NonfiniteOutputTracker,
)
from mp_agent.node.accounting.instruments import (
    CollectionTracker,
    EntropyTracker,
    Fp8FlushTracker,
    Fp8ScaleTracker,
    LogitTracker,
    RouterTracker,
    TensorTracker,
)
from mp_agent.node.accounting.latest import (
    LatestStep,
    OptimizerTracker,
    ParameterTracker,
    ReplicaTracker,
)
from mp_agent.node.accounting.layer_health import LayerHealth
from mp_agent.node.accounting.learning import (
    LearningTracker,
    LoopTracker,
    RateFall,
)
from mp_agent.node.accounting.levels import NormGrowthTracker, RelapseTracker
from mp_agent.node.accounting.loss import LossTracker
from mp_agent.node.accounting.loss_scale import (
    FloorSkips,
    LossScaleTracker,
    Misreadings,
    OverflowShares,
)
from mp_agent.node.accounting.ranks import (
    Pace,
    RankLossTracker,
    ReductionTracker,
    StragglerTracker,
)
from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.node.accounting.windows import NormWindows
from mp_agent.records.merged import MergedStep, StepTransition
from mp_agent.records.views import RunView


@dataclass(slots=True, kw_only=True)
class Progress:
    """The trackers of a run, in the order in which they observe a step. Stored in the ledger.

    A stateful metric is a `Tracker`, a line here, and one in `view` or `transition`; nothing else
    names it on its way from the step to the metric, or to the ledger and back.
    """

    incident: IncidentTracker = field(default_factory=IncidentTracker)
    learning: LearningTracker = field(default_factory=LearningTracker)
    rate_fall: RateFall = field(default_factory=RateFall)
    loop: LoopTracker = field(default_factory=LoopTracker)
    misreadings: Misreadings = field(default_factory=Misreadings)
    norms: NormTracker = field(default_factory=NormTracker)
    losses: LossTracker = field(default_factory=LossTracker)
    floor: FloorSkips = field(default_factory=FloorSkips)
    pace: Pace = field(default_factory=Pace)
    loss_scale: LossScaleTracker = field(default_factory=LossScaleTracker)
    overflows: OverflowShares = field(default_factory=OverflowShares)
    stragglers: StragglerTracker = field(default_factory=StragglerTracker)
    optimizers: OptimizerTracker = field(default_factory=OptimizerTracker)
    replicas: ReplicaTracker = field(default_factory=ReplicaTracker)
    reduction: ReductionTracker = field(default_factory=ReductionTracker)
    latest: LatestStep = field(default_factory=LatestStep)
    windows: NormWindows = field(default_factory=NormWindows)
    layers: LayerHealth = field(default_factory=LayerHealth)
    sustained: Sustained = field(default_factory=Sustained)
    without_gradient: WithoutGradient = field(default_factory=WithoutGradient)
    trained: ParameterTracker = field(default_factory=ParameterTracker)
    moments: SecondMoments = field(default_factory=SecondMoments)
    outputs: NonfiniteOutputTracker = field(default_factory=NonfiniteOutputTracker)
    backward: NonfiniteGradientTracker = field(default_factory=NonfiniteGradientTracker)
    logits: LogitTracker = field(default_factory=LogitTracker)
    policy: EntropyTracker = field(default_factory=EntropyTracker)
    routers: RouterTracker = field(default_factory=RouterTracker)
    fp8: Fp8ScaleTracker = field(default_factory=Fp8ScaleTracker)
    fp8_flushing: Fp8FlushTracker = field(default_factory=Fp8FlushTracker)
    tensors: TensorTracker = field(default_factory=TensorTracker)
    collections: CollectionTracker = field(default_factory=CollectionTracker)
    batches: BatchTracker = field(default_factory=BatchTracker)
    rank_losses: RankLossTracker = field(default_factory=RankLossTracker)
    relapse: RelapseTracker = field(default_factory=RelapseTracker)
    norm_growth: NormGrowthTracker = field(default_factory=NormGrowthTracker)
    baseline: BaselineTracker = field(default_factory=BaselineTracker)

    @property
    def trackers(self) -> Iterator[Tracker]:
        """All trackers of the account."""
        return (getattr(self, declared.name) for declared in fields(self))

    @property
    def last(self) -> MergedStep | None:
        """The last closed step."""
        return self.latest.last

    def view(self, run: RunView, context: AccountContext, time_unix_seconds: float) -> RunView:
        """Return the run with what gauges read of all trackers; of windows, at a time."""
        return replace(
            run,
            latest=self.latest.view(context),
            loss=self.losses.view(context),
            loss_scale=self.loss_scale.view(),
            learning=self.learning.view(),
            loop=self.loop.view(),
            norms=self.norms.view(),
            norm_extremes=self.windows.view(context, time_unix_seconds),
            optimizers=self.optimizers.views,
            first_nonfinite=self.incident.first,
            first_nonfinite_output=self.outputs.first,
            first_nonfinite_gradient=self.backward.first,
            replicas=self.replicas.views,
            unreduced_steps=self.reduction.unreduced_steps,
            usual_step_seconds=self.pace.usual_seconds,
            straggler=self.stragglers.worst,
            layers=self.layers.view(context),
            sustained_steps=dict(self.sustained.steps),
            without_gradient=self.without_gradient.view(context),
            trained=self.trained.view(),
            moments=self.moments.view(context),
            logits=self.logits.view(),
            policy_collapsed_steps=self.policy.collapsed_steps,
            routers=self.routers.view(context),
            fp8=self.fp8.view(context),
            fp8_flushing=self.fp8_flushing.view(context),
            tensors=self.tensors.view(),
            batches=self.batches.view(),
            loss_outliers=self.rank_losses.outliers,
            loss_level=self.rank_losses.level,
            relapsed_steps=self.relapse.steps,
            norm_growth=self.norm_growth.view(),
            collections=self.collections.views,
            departures=self.baseline.view(context, run.facts),
        )

    def transition(
        self, step: MergedStep, previous: MergedStep | None, thresholds: Mapping[str, float]
    ) -> StepTransition:
        """Return what counters count of the step that was observed last."""
        return StepTransition(
            step=step,
            previous=previous,
            thresholds=thresholds,
            nonfinite_loss_skips=self.incident.suspect_steps,
            recent_floor_skips=self.floor.recent,
            scale_lowered_again=self.loss_scale.lowered_again,
            overflow_bounds=self.overflows.exceeded,
            loss_spiking=self.losses.unexplained,
            exploded=self.norms.exploded,
            loss_outliers=self.rank_losses.outliers is not None,
            nonfinite_gradient_steps=self.learning.nonfinite_steps,
            rate_jumped=self.learning.rate_jumped,
            rate_jump_step=self.learning.rate_jump_step,
            rate_fell=self.rate_fall.found,
            rate_fall_step=self.rate_fall.begin_step,
        )

    def next_attempt(self) -> "Progress":
        """Return the state with which the run's next attempt starts."""
        return type(self)(
            **{one.name: getattr(self, one.name).next_attempt() for one in fields(self)}
        )

    def with_restarted(self, tracker: Tracker) -> "Progress":
        """Return the state in which one of the trackers begins again."""
        name = next(one.name for one in fields(self) if getattr(self, one.name) is tracker)
        return replace(self, **{name: tracker.next_attempt()})  # type: ignore[arg-type]

    def next_model(self) -> "Progress":
        """Return the state with which the run goes on where it begins to train another model."""
        return type(self)(
            **{one.name: getattr(self, one.name).next_model() for one in fields(self)}
        )
