"""Immutable views of a run, its layers, ranks and node agents, from which metrics are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.records.baseline import BaselineDeparture
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.health import (
    BatchHealth,
    Fp8Flushing,
    Fp8Scaling,
    Laggard,
    LatestValues,
    LayersWithoutGradient,
    Learning,
    LogitGrowth,
    LoopMistakes,
    LossHistory,
    LossScaleHistory,
    NormGrowth,
    NormStanding,
    OddRank,
    RouterBalance,
    StaleMoments,
    Straggler,
    TensorRows,
    TrainedParameters,
    TroubledLayers,
)
from mp_agent.records.merged import OptimizerStep
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerView:
    """One of several optimizers."""

    last: OptimizerStep
    judged: OptimizerStep | None = None
    """The last step whose norms count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceView:
    """Result of the last comparison of replicas."""

    agree: bool
    step: int
    """The step on which they were compared."""
    minority_ranks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    """Those that differ, as far as they are known."""
    unjudged: tuple[str, ...] = ()
    """Tensors that differ although nothing shows that they were ever copies."""
    local: tuple[str, ...] = ()
    """Tensors that differ by design."""
    rates: tuple[float, float] | None = None
    """The lowest and the highest learning rate of the ranks on that step, if these differ too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonfinite:
    """Where an incident began. Strings are empty where there is no evidence."""

    step: int
    rank: str
    layer: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonfiniteOutput:
    """The first module of a forward pass whose output was not finite, and the trainer's step."""

    step: int
    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonfiniteGradient:
    """Where in a backward pass the first gradient arose that was not finite."""

    step: int
    """The step in the trainer's count."""
    layer: str
    place: str
    """`within` the module; or `after` it in forward: in a function or the loss that follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFindings:
    """What `mp-agent check` found in the main script and what it imports of its project."""

    files: int
    """Number of files that were checked; 0 if the check failed."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Findings by rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerLink:
    """Where an experiment tracker shows a run."""

    tracker: str
    name: str
    url: str
    """An http, https or file address; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionView:
    """The gradients of several layers as one group."""

    layers: int = 0
    """How many there are, measured or not."""
    nonfinite_elements: float = 0.0
    """NaN and Inf elements at the last sampled step, whether it counts or not."""
    families: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The columns of each family, of the last sampled step on which the group counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The state of a run after its last closed step; what run-scope gauges read.

    From `latest` to `departures`, but for `laggards`, each field is what a tracker shows.
    """

    identity: RankIdentity
    """Identity of the lowest local rank seen."""
    facts: Mapping[str, str]
    nodes: int
    active: bool
    end_reason: EndReason
    """RUNNING while active."""
    phase_name: str
    latest: LatestValues = field(default_factory=LatestValues)
    loss: LossHistory = field(default_factory=LossHistory)
    loss_scale: LossScaleHistory = field(default_factory=LossScaleHistory)
    learning: Learning = field(default_factory=Learning)
    loop: LoopMistakes = field(default_factory=LoopMistakes)
    norms: Mapping[str, NormStanding] = field(default_factory=dict)
    """Standings by optimizer; the main one, or that of the whole model, under the empty name."""
    norm_extremes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Likewise, the largest and the smallest norm over the window."""
    optimizers: Mapping[str, OptimizerView] = field(default_factory=dict)
    """Where there are several, by the value of the label `optimizer`."""
    first_nonfinite: FirstNonfinite | None = None
    first_nonfinite_output: FirstNonfiniteOutput | None = None
    first_nonfinite_gradient: FirstNonfiniteGradient | None = None
    replicas: Mapping[str, DivergenceView] = field(default_factory=dict)
    """The last comparison of `gradients` and of `weights`, if there was one."""
    unreduced_steps: int = 0
    """Consecutive steps of copies with gradients that were not all reduced, once that is sure."""
    usual_step_seconds: float | None = None
    straggler: Straggler | None = None
    laggards: tuple[Laggard, ...] = ()
    layers: TroubledLayers | None = None
    sustained_steps: Mapping[str, int] = field(default_factory=dict)
    """Limit → steps over which every sample was beyond it."""
    """None before any layer was sampled."""
    without_gradient: LayersWithoutGradient | None = None
    """None before enough steps."""
    trained: TrainedParameters = field(default_factory=TrainedParameters)
    moments: StaleMoments | None = None
    """None before any layer with second moments was sampled."""
    logits: LogitGrowth | None = None
    """None before any was sampled."""
    policy_collapsed_steps: int | None = None
    """Compared steps in a row of which next to none of the policy's entropy was left; None where
    that is not known."""
    routers: RouterBalance | None = None
    """None before any was sampled."""
    fp8: Fp8Scaling | None = None
    fp8_flushing: Fp8Flushing | None = None
    """None before any layer with delayed scaling was sampled."""
    tensors: TensorRows = field(default_factory=TensorRows)
    batches: BatchHealth = field(default_factory=BatchHealth)
    loss_outliers: OddRank | None = None
    """The rank with single losses far above all that the others have had lately."""
    relapsed_steps: int = 0
    """Steps for which the loss has been back at its initial level."""
    norm_growth: NormGrowth | None = None
    loss_level: OddRank | None = None
    """The rank whose losses are all far from those of the others."""
    collections: Mapping[str, CollectionView] = field(default_factory=dict)
    """The groups of parameters that the script has defined, by name."""
    departures: tuple[BaselineDeparture, ...] | None = None
    """Where the run differs from its baseline, ascending by step; None without one."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Thresholds by name, as this job has set them."""
    attempts: int = 0
    """Number of starts of the run on this node."""
    standing_seconds: float | None = None
    """Time since the last step or change of the kind of phase."""
    longest_pause_seconds: float | None = None
    """Longest of the pauses in training that ended."""
    longest_phase_seconds: float | None = None
    """Longest of the earlier phases outside training of the current kind."""
    script: ScriptFindings | None = None
    """None until the main script was checked, which only some jobs want."""
    pages_url: str = ""
    """Base URL of the agent that serves the run's pages, as other machines reach it."""
    trackers: tuple[TrackerLink, ...] = ()
    """The experiment trackers that the run is sent to, once it is open there."""
    conditions: tuple[ActiveCondition, ...] = ()
    """The active conditions."""
    conditions_fired: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How often each began, by condition and severity; contains all that exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer merged over the ranks of the latest sampled step, in one family of columns."""

    name: str
    values: Mapping[str, float]
    """Values by column."""
    judged: bool
    """Whether the sampled step's norms count (complete, finite, not skipped)."""
    family: str = GRADIENTS.name
    step: int = 0
    """The trainer's step of which `values` are."""
    later: "LayerView | None" = None
    """The latest sample, where it is later than `values` since its norms do not count."""

    @property
    def latest(self) -> "LayerView":
        """The latest sample, whether its norms count or not."""
        return self.later or self

    @property
    def nonfinite_elements(self) -> float:
        """NaN and Inf elements of gradients in the latest sample."""
        return GRADIENTS.nonfinite_elements(self.latest.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One local rank: its identity, its state, and its last complete record."""

    identity: RankIdentity
    facts: Mapping[str, str]
    state: RankState
    up: bool
    step: int | None = None
    step_time_unix_seconds: float | None = None
    values: Mapping[str, float] | None = None
    """Observed (finite) step columns of the last record, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportView:
    """Traffic between this node agent and the others of a run."""

    push_failures: int = 0
    pushed_bytes: int = 0
    reports_dropped: int = 0
    pushes_put_off: int = 0
    """Pushes that the root asked to be sent later."""
    push_interval_seconds: float | None = None
    """At the root, the longest that any node may follow; None of a run on one node."""
    last_push_unix_seconds: float | None = None
    """When the root agent last accepted a report; None at the root, and before the first."""
    received_bytes: int = 0
    requests_refused: int = 0
    nodes_known: int | None = None
    """Nodes that have reported, the root's own included; None elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAccount:
    """Results of one exporter's pushes since the node agent started."""

    exporter: str
    failures: int
    rejected: int = 0
    """Data points, log records, spans and numbers that were dropped or rejected permanently."""
    last_success_unix_seconds: float | None
    """None before the first success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """The node agent's own account of one run."""

    version: str
    counting_seconds: float | None = None
    """Time since the counters started from 0; None if not known."""
    probe_seconds: float
    probe_errors: int
    setting_errors: int
    records_dropped: int
    series_dropped: int
    rank_series_left_out: float | None = None
    """None without `rank_series`."""
    scrape_duration_seconds: float | None
    unsupported: tuple[str, ...]
    exports: tuple[ExportAccount, ...] = ()
    """Accounts of the exporters that push."""
    transport: TransportView = TransportView()
    flight_records: int = 0
    flight_errors: int = 0
    """Flight records written, and those that could not be."""
