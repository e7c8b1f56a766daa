"""One step of the run, merged over its ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import numpy.typing as npt

from mp_agent.records.columns import GRADIENTS, GRADIENTS_REPLACED, ColumnFamily
from mp_agent.records.steps import FloatArray

_GRADIENTS = GRADIENTS.name

FIRST = "0"
"""Names the first optimizer's part of gradients of which others step the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """What one of several optimizers trains, measured during a step of the run."""

    sequence: int
    families: Mapping[str, Mapping[str, float]]
    """Merged columns by family and name; always finite."""
    complete: frozenset[str]
    """Families of which every shard of every tensor that it steps was present."""
    joint: bool = False
    """Whether its gradients count in the run's: it trains the same model as the first optimizer."""

    @property
    def gradients(self) -> Mapping[str, float]:
        """The columns of the gradients."""
        return self.families.get(_GRADIENTS, {})

    @property
    def nonfinite_elements(self) -> float:
        """NaN and Inf gradient elements together."""
        return GRADIENTS.nonfinite_elements(self.gradients)

    @property
    def judged(self) -> bool:
        """Whether norms of this step may enter gauges and thresholds."""
        return self.counts(GRADIENTS)

    def counts(self, family: ColumnFamily) -> bool:
        """Return whether a family is complete, and of finite elements only."""
        return family.name in self.complete and family.counts(self.families.get(family.name, {}))

    @property
    def grad_norm(self) -> float | None:
        """L2 norm over the finite elements, judged or not."""
        squares = self.gradients.get("sum_squares")
        return None if squares is None else sqrt(squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of comparing the replicas of the same tensors on one step."""

    agree: bool
    minority_ranks: tuple[int, ...] = ()
    """Ranks that differ from a majority; none when they agree, or when there is no majority."""
    tensors: tuple[str, ...] = ()
    """Those that differ, as far as they are known."""
    unjudged: tuple[str, ...] = ()
    """Tensors that differ although nothing shows that they were ever copies."""
    local: tuple[str, ...] = ()
    """Tensors that differ by design, such as the statistics of BatchNorm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Whether ranks that hold copies of one model stepped with the same gradients."""

    reduced: bool
    equal_before: bool = False
    """Whether the weights were equal before the step, as after they have been averaged, or were not
    looked at, as in the second pass of SAM."""
    wrapped: bool = True
    """Whether a wrapper is there to reduce gradients."""
    claimed: bool = False
    """Whether it says that it did."""
    everywhere: bool = False
    """No two ranks had the same gradients."""
    measured: bool = True
    """Whether gradients were looked at; without them `equal_before` alone says anything."""
    withheld: frozenset[str] = frozenset()
    """Kinds of comparison that found copies to differ, as they do while they train apart."""

    @property
    def apart(self) -> bool:
        """Whether copies trained apart: by their own gradients, from weights that differed."""
        return not self.equal_before and self.parts

    @property
    def parts(self) -> bool:
        """Whether the update leaves copies different, as far as its gradients show it."""
        return self.measured and (not self.reduced or self.contradicted)

    @property
    def contradicted(self) -> bool:
        """Whether a wrapper says that it reduced gradients of which no two ranks' are the same."""
        return self.claimed and self.everywhere


class RankValues(Mapping[int, float]):
    """Values of ranks, by rank, ascending; arrays inside, as a run may have 100 000 ranks."""

    def __init__(self, ranks: npt.NDArray[np.intp], values: FloatArray) -> None:
        self.ranks = ranks
        self.array = values

    @classmethod
    def of(cls, values: Mapping[int, float]) -> "RankValues":
        """Return the same values as these."""
        if isinstance(values, RankValues):
            return values
        ranks = sorted(values)
        return cls(np.array(ranks, dtype=np.intp), np.array([values[rank] for rank in ranks]))

    @classmethod
    def finite(cls, values_R: FloatArray) -> "RankValues":
        """Return the values, each at the place of its rank, that are finite."""
        ranks = np.flatnonzero(np.isfinite(values_R))
        return cls(ranks, values_R[ranks])

    def __getitem__(self, rank: int) -> float:
        place = int(np.searchsorted(self.ranks, rank))
        if place < len(self.ranks) and self.ranks[place] == rank:
            return float(self.array[place])
        raise KeyError(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks.tolist())

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStep:
    """One step of the run, merged over the ranks that delivered it before the deadline.

    columns: merged `STEP_COLUMNS` by name. families: merged columns by family and name. What no
    rank observed is absent. Always finite.
    """

    sequence: int
    step: int
    time_unix_seconds: float
    columns: Mapping[str, float]
    world_size: int
    present_ranks: frozenset[int]
    families: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    complete: frozenset[str] = frozenset()
    """Families of which every shard of every tensor was present; a partial norm never counts."""
    nonfinite_loss_ranks: tuple[int, ...] = ()
    nonfinite_gradient_ranks: tuple[int, ...] = ()
    """Whose own gradients were the first that were not finite, before they were reduced; none
    where that is not measured."""
    compute_seconds: Mapping[int, float] = field(default_factory=dict)
    """Time before the first collective of the step, by rank; of all nodes."""
    optimizers: Mapping[str, OptimizerStep] = field(default_factory=dict)
    """Those that were measured, where there are several: the parts of the run's gradients, with the
    first optimizer's under `FIRST`, and the optimizers of other models. None for a single one."""
    optimizers_held: frozenset[str] = frozenset()
    """The names of all that there are, measured or not."""
    replicas: Mapping[str, Comparison] = field(default_factory=dict)
    """What could be compared: `gradients`, `weights` before the step, `state` that no optimizer
    steps."""
    reduction: Reduction | None = None
    """None where nothing shows that ranks hold copies."""
    batches: Mapping[str, Mapping[float, Sequence[int]]] = field(default_factory=dict)
    """Digests of the first batch, each with the ranks that had it; by the name of ranks that are to
    have data of their own, empty where that is unknown. Only of steps that were looked at."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Losses of the ranks, those that are finite; as `compute_seconds`, of all nodes."""
    batch_rows: Mapping[int, float] = field(default_factory=dict)
    """Sizes of the first batch by rank; of the same steps as `batches`."""
    independent: bool = False
    """Whether no two ranks hold copies, or parts, of anything that is trained: each trains a model
    of its own."""
    undecided: tuple[str, ...] = ()
    """Tensors with gradients of which nothing shows whether ranks hold copies of them or parts."""
    gradients_observed: bool = True
    """Whether the source looks at gradients at all: a trainer's log may hold no norm."""

    def get(self, column: str) -> float | None:
        """Return a merged column of the step or of the gradients; None when no rank observed it.

        Columns of other families are in `families`.
        """
        value = self.columns.get(column)
        if value is None and _GRADIENTS in self.families:
            return self.families[_GRADIENTS].get(column)
        return value

    @property
    def gradients(self) -> Mapping[str, float]:
        """The columns of the gradients."""
        return self.families.get(_GRADIENTS, {})

    def counts(self, family: ColumnFamily) -> bool:
        """Return whether a family's values may enter gauges, windows and thresholds."""
        # First what most families of most steps fail.
        if family.name not in self.complete or (self.skipped and not family.counts_when_skipped):
            return False
        return family.counts(self.families.get(family.name, {}))

    def flag(self, column: str) -> bool:
        """Return whether a 0/1 column is set on any rank."""
        return self.columns.get(column, 0.0) > 0.0

    @property
    def skipped(self) -> bool:
        """Whether GradScaler skipped the update."""
        return self.columns.get("skipped", 0.0) > 0.0

    @property
    def skipped_by_guard(self) -> bool:
        """Whether the guard kept the update from the weights, and not in a dry run."""
        return self.columns.get("guard_skip_update", 0.0) == 1.0

    @property
    def weights_kept(self) -> bool:
        """Whether GradScaler or the guard kept the update from the weights."""
        return self.skipped or self.skipped_by_guard

    @property
    def loss_scale(self) -> float | None:
        """The loss scale in force; None without one.

        Some trainers log -1 or 0 where there is no scaler: what is not positive scales nothing.
        """
        scale = self.columns.get("loss_scale")
        return None if scale is None or scale <= 0.0 else scale

    @property
    def gradient_nonfinite_elements(self) -> float:
        """NaN and Inf gradient elements together."""
        return GRADIENTS.nonfinite_elements(self.gradients)

    @property
    def gradients_replaced(self) -> bool:
        """Whether the update used finite gradients in place of NaN or Inf that backward had made.

        A rank's own gradients show that, or the few that are looked at on some steps.
        """
        seen = bool(self.nonfinite_gradient_ranks) or self.flag(GRADIENTS_REPLACED)
        return seen and not self.weights_kept and self.gradient_nonfinite_elements == 0.0

    @property
    def gradients_complete(self) -> bool:
        """Whether every shard of every tensor was present; a partial norm is never judged."""
        return GRADIENTS.name in self.complete

    @property
    def gradients_judged(self) -> bool:
        """Whether norms of this step may enter gauges, windows and thresholds."""
        return self.counts(GRADIENTS)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm over the finite elements, judged or not."""
        squares = self.gradients.get("sum_squares")
        return None if squares is None else sqrt(squares)

    @property
    def clip_coefficient(self) -> float | None:
        """Factor that clipping applied: min(1, max_norm / (norm + 1e-6)), as torch computes it."""
        limit, norm = self.columns.get("clip_max_norm"), self.columns.get("clip_norm")
        if limit is None or norm is None:
            return None
        return min(1.0, limit / (norm + 1e-6))

    @property
    def contained(self) -> bool:
        """Whether clipping, a scaler or the guard kept the size of the gradients from the weights.

        As far as that is known: of a clipping that no hook sees it is not.
        """
        coefficient = self.clip_coefficient
        clipped = coefficient is not None and coefficient < 1.0
        return clipped or self.weights_kept or self.columns.get("guard_clip_gradients", 0.0) == 1.0

    @property
    def coverage(self) -> float:
        """Share of the run's ranks that delivered this step."""
        return len(self.present_ranks) / self.world_size

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that did not deliver this step, ascending."""
        if len(self.present_ranks) == self.world_size:
            return ()
        return tuple(sorted(set(range(self.world_size)) - self.present_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTransition:
    """A closed step, with the context that counters need."""

    step: MergedStep
    previous: MergedStep | None
    thresholds: Mapping[str, float]
    """Values by name, from `catalog.thresholds` and settings."""
    nonfinite_loss_skips: int = 0
    """Consecutive skipped steps, this one included, with a non-finite loss."""
    recent_floor_skips: int = 0
    """If this step was skipped at the scale's floor: so many were within `floor_skip_steps`."""
    loss_outliers: bool = False
    """Whether one rank has single losses far above all that the others had lately."""
    scale_lowered_again: bool = False
    """Whether this step's decrease of the loss scale is one of too many in a row."""
    overflow_bounds: Sequence[str] = ()
    """If this step was skipped: names of the thresholds that the share of skipped ones exceeds."""
    loss_spiking: bool = False
    """Whether the loss of this step belongs to a spike."""
    exploded: Mapping[str, float] = field(default_factory=dict)
    """Optimizers whose norm was far above their own usual one, to that norm; the main one, or the
    whole model, under the empty name."""
    nonfinite_gradient_steps: int = 0
    """Consecutive steps, this one included, with non-finite gradients not due to calibration."""
    rate_jumped: bool = False
    """Whether the learning rate was far above all previous ones, or proved to have been."""
    rate_jump_step: int | None = None
    """The trainer's step of the last such rate; None before one."""
    rate_fell: bool = False
    """Whether the learning rate has collapsed within a few steps, and stayed low."""
    rate_fall_step: int | None = None
    """The trainer's step since which it was so last; None before."""
