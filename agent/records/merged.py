"""What a merge says of one step, and what the run, rank, layer and agent metrics are read from."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason, RankState


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
    loss_scale_consecutive_decreases: int = 0
    norm_window_max: float | None = None
    norm_window_min: float | None = None
    coverage: float = 1.0
    missing_ranks: tuple[int, ...] = ()
    first_nonfinite: FirstNonfinite | None = None


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
