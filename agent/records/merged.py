"""What a merge says of one step, and what the run, rank, layer and agent metrics are read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.health import Health
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason, RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """The gradients of one more optimizer, measured during a step of the run."""

    sequence: int
    values: Mapping[str, float]
    """Merged `GRADIENT_COLUMNS` by name; always finite."""
    complete: bool
    """Whether every shard of every tensor that it steps was present."""

    @property
    def nonfinite_elements(self) -> float:
        """NaN and Inf gradient elements together."""
        return self.values.get("nan_elements", 0.0) + self.values.get("inf_elements", 0.0)

    @property
    def judged(self) -> bool:
        """Whether norms of this step may enter gauges and thresholds."""
        return self.complete and "sum_squares" in self.values and self.nonfinite_elements == 0.0

    @property
    def grad_norm(self) -> float | None:
        """L2 norm over the finite elements, judged or not."""
        squares = self.values.get("sum_squares")
        return None if squares is None else sqrt(squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the replicas of the same tensors said of each other on one step."""

    agree: bool
    minority_ranks: tuple[int, ...] = ()
    """Ranks that differ from a majority; none when they agree, or when there is no majority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStep:
    """One step of the run, merged over the ranks that delivered it before the deadline.

    values: merged columns by name, `STEP_COLUMNS` and `GRADIENT_COLUMNS`; a column that no rank
    observed is absent. Always finite.
    """

    sequence: int
    step: int
    time_unix_seconds: float
    values: Mapping[str, float]
    world_size: int
    present_ranks: frozenset[int]
    gradients_complete: bool
    """Whether every shard of every tensor was present; a partial norm is never judged."""
    nonfinite_loss_ranks: tuple[int, ...] = ()
    compute_seconds: Mapping[int, float] = field(default_factory=dict)
    """Time before the first collective of the step, by rank; of all nodes."""
    optimizers: Mapping[str, OptimizerStep] = field(default_factory=dict)
    """Of the optimizers other than the one that sets the step count, those that were measured."""
    replicas: Mapping[str, Comparison] = field(default_factory=dict)
    """What could be compared: `gradients`, `weights`."""

    def get(self, column: str) -> float | None:
        """Return a merged column, or None when no rank observed it."""
        return self.values.get(column)

    def flag(self, column: str) -> bool:
        """Return whether a 0/1 column is set on any rank."""
        return self.values.get(column, 0.0) > 0.0

    @property
    def skipped(self) -> bool:
        """Whether GradScaler skipped the update."""
        return self.flag("skipped")

    @property
    def gradient_nonfinite_elements(self) -> float:
        """NaN and Inf gradient elements together."""
        return self.values.get("nan_elements", 0.0) + self.values.get("inf_elements", 0.0)

    @property
    def gradients_judged(self) -> bool:
        """Whether norms of this step may enter gauges, windows and thresholds."""
        return (
            self.gradients_complete
            and not self.skipped
            and "sum_squares" in self.values
            and self.gradient_nonfinite_elements == 0.0
        )

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm over the finite elements, judged or not."""
        squares = self.values.get("sum_squares")
        return None if squares is None else sqrt(squares)

    @property
    def clip_coefficient(self) -> float | None:
        """Factor that clipping applied: min(1, max_norm / (norm + 1e-6)), as torch computes it."""
        limit, norm = self.values.get("clip_max_norm"), self.values.get("clip_norm")
        if limit is None or norm is None:
            return None
        return min(1.0, limit / (norm + 1e-6))

    @property
    def coverage(self) -> float:
        """Share of the run's ranks that delivered this step."""
        return len(self.present_ranks) / self.world_size

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that did not deliver this step, ascending."""
        return tuple(sorted(set(range(self.world_size)) - self.present_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTransition:
    """A closed step, with what counters need to know of the one before it."""

    step: MergedStep
    previous: MergedStep | None
    thresholds: Mapping[str, float]
    """Values by name, from `catalog.thresholds` and settings."""
    nonfinite_loss_skips: int = 0
    """Skipped steps in a row, this one included, on which the loss was not finite."""
    recent_floor_skips: int = 0
    """If this step was skipped at the scale's floor: so many were within `floor_skip_steps`."""
    loss_spiking: bool = False
    """Whether the loss of this step belongs to a spike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerView:
    """An optimizer other than the one that sets the step count."""

    last: OptimizerStep
    judged: OptimizerStep | None = None
    """The last step whose norms count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceView:
    """What the last comparison of replicas showed."""

    agree: bool
    step: int
    """The step on which they were compared."""
    minority_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonfinite:
    """Where an incident began. Empty strings for what no evidence names."""

    step: int
    rank: str
    layer: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The state of a run after its last closed step; what run-scope gauges read."""

    identity: RankIdentity
    """Of the lowest local rank seen."""
    facts: Mapping[str, str]
    nodes: int
    active: bool
    end_reason: EndReason
    """RUNNING while active."""
    phase_name: str
    last: MergedStep | None = None
    judged: MergedStep | None = None
    """The last step with `gradients_judged`."""
    loss: float | None = None
    """Last finite merged loss."""
    learning_rate: float | None = None
    loss_scale: float | None = None
    loss_scale_initial: float | None = None
    loss_scale_calibrated: float | None = None
    """The first one after `calibration_steps` of the attempt."""
    loss_scale_consecutive_decreases: int = 0
    norm_window_max: float | None = None
    norm_window_min: float | None = None
    coverage: float = 1.0
    missing_ranks: tuple[int, ...] = ()
    first_nonfinite: FirstNonfinite | None = None
    optimizers: Mapping[str, OptimizerView] = field(default_factory=dict)
    """The other optimizers, by the value of the label `optimizer`."""
    replicas: Mapping[str, DivergenceView] = field(default_factory=dict)
    """The last comparison of `gradients` and of `weights`, if there was one."""
    health: Health = field(default_factory=Health)
    conditions: tuple[ActiveCondition, ...] = ()
    """Conditions that the detectors say hold now."""
    conditions_fired: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How often each began, by condition and severity; holds all that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer merged over the ranks of the latest sampled step. `values` by gradient column."""

    name: str
    values: Mapping[str, float]
    judged: bool
    """Whether the sampled step's norms count (complete, finite, not skipped)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One local rank: who it is, where it stands, and its last complete record."""

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
    """What went between this node agent and the others of a run."""

    push_failures: int = 0
    pushed_bytes: int = 0
    reports_dropped: int = 0
    last_push_unix_seconds: float | None = None
    """When the root agent last took a report; None at the root, and before the first."""
    received_bytes: int = 0
    requests_refused: int = 0
    nodes_known: int | None = None
    """Nodes that the root has heard of, itself included; None elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAccount:
    """How the pushes of one exporter went since the node agent started."""

    exporter: str
    failures: int
    last_success_unix_seconds: float | None
    """None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """The node agent's own account of one run."""

    version: str
    probe_seconds: float
    probe_errors: int
    setting_errors: int
    records_dropped: int
    series_dropped: int
    scrape_duration_seconds: float | None
    unsupported: tuple[str, ...]
    exports: tuple[ExportAccount, ...] = ()
    """Of the exporters that push."""
    transport: TransportView = TransportView()
    flight_records: int = 0
    flight_errors: int = 0
    """Flight records written, and those that could not be."""
