"""What a post-mortem may find: causes, where they appeared, and arguments for and against."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from mp_agent.records.columns import ACTIVATIONS, OPTIMIZER, TENSORS
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import FloatArray
from mp_agent.records.views import FirstNonfinite

ALERTING = ("critical", "warning")
"""Severities of conditions that a finding has to explain."""

LIKELY, POSSIBLE = 6, 3
"""Lowest scores of a likely and of a possible diagnosis; below, it is unlikely."""

DECISIVE, STRONG, MEDIUM, WEAK = 6, 4, 2, 1
"""Weights of arguments: observed directly; hardly explained otherwise; best explained by this
cause; merely consistent with it."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause in the taxonomy.

    conditions: alerts whose remedies apply, best first. shown_by: alerts that show it, and by whose
    `follows_from` it is a consequence of other causes, if not the same ones. phase: in which it
    happens, if that is known of the cause alone.
    """

    name: str
    title: str
    conditions: tuple[str, ...]
    shown_by: tuple[str, ...] | None = None
    phase: str = ""

    @property
    def signs(self) -> tuple[str, ...]:
        """The alerts that show it."""
        return self.conditions if self.shown_by is None else self.shown_by


class Causes(Enum):
    """The part of the taxonomy that the measured values can show."""

    NONFINITE_ON_ONE_RANK = Cause(
        "nonfinite_forward_one_rank",
        "Non-finite values in the forward pass of single ranks: their data or their hardware",
        ("MpAgentRankNonFinite", "MpAgentLossNonFinite"),
        shown_by=("MpAgentRankNonFinite",),
        phase="forward",
    )
    OWN_NAN = Cause(
        "nonfinite_backward_one_rank",
        "NaN in the own gradients of single ranks, on skipped steps: their data or their hardware",
        ("MpAgentRankNonFinite",),
        phase="backward",
    )
    NONFINITE_FORWARD = Cause(
        "nonfinite_forward",
        "Non-finite values in the forward pass of all ranks: the model, its weights or its inputs",
        ("MpAgentLossNonFinite", "MpAgentGradientNonFinite"),
        shown_by=("MpAgentRankNonFinite",),
        phase="forward",
    )
    NONFINITE_BACKWARD = Cause(
        "nonfinite_backward",
        "Non-finite gradients that originate in the backward pass",
        ("MpAgentNonFiniteUpdate", "MpAgentLossNonFinite", "MpAgentRankNonFinite"),
        shown_by=("MpAgentRankNonFinite",),
        phase="backward",
    )
    ONE_RANK_OFF = Cause(
        "one_rank_off",
        "One step of a single rank: its data or its hardware",
        ("MpAgentRankNonFinite",),
        shown_by=(),
    )
    NONFINITE_UPDATE = Cause(
        "nonfinite_update",
        "The optimizer was stepped with non-finite gradients: no scaler skipped the step",
        ("MpAgentNonFiniteUpdate",),
        phase="optimizer",
    )
    ZERO_EPSILON = Cause(
        "zero_epsilon",
        "The optimizer divides by 0: its state's format rounds epsilon to 0",
        ("MpAgentAdamEpsilonUnsafe",),
        shown_by=(),
        phase="optimizer",
    )
    LOSS_SCALE_COLLAPSE = Cause(
        "loss_scale_collapse",
        "Loss-scale collapse: overflows that no lower scale prevents",
        ("MpAgentLossScaleAtFloor", "MpAgentOverflowRatioHigh"),
        shown_by=("MpAgentLossScaleAtFloor", "MpAgentLossScaleFarBelowInitial"),
        phase="backward",
    )
    LOSS_SCALE_FALLING = Cause(
        "loss_scale_falling",
        "The loss scale keeps falling: frequent overflows",
        (
            "MpAgentLossScaleConsecutiveDecreases",
            "MpAgentLossScaleLowAndFalling",
            "MpAgentOverflowRatioHigh",
        ),
        phase="backward",
    )
    LEARNING_RATE_JUMP = Cause(
        "learning_rate_jump",
        "The learning rate jumped far above what the run was trained with",
        ("MpAgentLearningRateJump",),
        phase="optimizer",
    )
    LEARNING_RATE_ZERO = Cause(
        "learning_rate_zero",
        "The learning rate is 0: the schedule ended before the run",
        ("MpAgentNothingTrained",),
        shown_by=(),
        phase="optimizer",
    )
    ZERO_GRADIENTS = Cause(
        "zero_gradients",
        "All gradients are exactly 0: masked labels, or a factor of 0 before the parameters",
        ("MpAgentNothingTrained",),
        phase="backward",
    )
    WITHOUT_GRADIENTS = Cause(
        "optimizer_without_gradients",
        "The optimizer steps tensors that get no gradients",
        ("MpAgentLayersWithoutGradient", "MpAgentNothingTrained"),
        shown_by=(),
        phase="optimizer",
    )
    CONSTANT_LOSS = Cause(
        "constant_loss",
        "The loss no longer changes: weights that are gone, or a model that answers always alike",
        ("MpAgentNothingTrained",),
        shown_by=(),
        phase="backward",
    )
    UNUSUAL_BATCH = Cause(
        "unusual_batch",
        "The data of single batches: far from that of the others",
        ("MpAgentLossSpike",),
        shown_by=(),
        phase="forward",
    )
    GPU_ERROR = Cause(
        "gpu_error",
        "A GPU failed: its driver reported errors",
        ("MpAgentRankNonFinite", "MpAgentRunFailed"),
        shown_by=(),
    )
    NEVER_REDUCED = Cause(
        "gradients_not_reduced",
        "Gradients were not reduced, or not all of them",
        ("MpAgentGradientsNotReduced",),
        phase="backward",
    )
    REPLICA_DIVERGENCE = Cause(
        "replica_divergence",
        "Replicas are not equal: tensors that are not reduced, an operation or the memory of "
        "single ranks",
        ("MpAgentReplicaDivergence",),
        phase="optimizer",
    )
    GRADIENT_EXPLOSION = Cause(
        "gradient_explosion", "Gradient explosion", ("MpAgentGradientExplosion",), phase="backward"
    )
    CONTAINED_EXPLOSION = Cause(
        "contained_explosion",
        "Exploding gradients that clipping or the guard kept from the weights: the loss stayed at "
        "its usual level",
        ("MpAgentGradientExplosion",),
        shown_by=(),
        phase="backward",
    )
    GRADIENT_VANISHING = Cause(
        "gradient_vanishing", "Vanishing gradients", ("MpAgentGradientVanishing",), phase="backward"
    )
    GRADIENT_UNDERFLOW = Cause(
        "gradient_underflow",
        "Gradients become zero or too small: layers stop learning",
        ("MpAgentGradientUnderflow", "MpAgentLayerGradientDead", "MpAgentGradientVanishing"),
        shown_by=("MpAgentGradientUnderflow", "MpAgentLayerGradientDead"),
        phase="backward",
    )
    LOSS_DIVERGING = Cause(
        "loss_diverging",
        "The loss diverges",
        ("MpAgentLossDiverging", "MpAgentLossSpike", "MpAgentGradientExplosion"),
        shown_by=("MpAgentLossDiverging",),
        phase="forward",
    )
    RANK_KILLED = Cause(
        "rank_killed",
        "Ranks were killed from outside: memory, scheduler or hardware",
        ("MpAgentRunFailed",),
        shown_by=(),
    )
    RANK_FAILED = Cause("rank_failed", "The program ended with an error", ("MpAgentRunFailed",))
    RANK_STALLED = Cause(
        "rank_stalled", "The run is stalled", ("MpAgentRankStalled", "MpAgentRunStalled")
    )


_UNMEASURED = (
    ("reduction_swallows", "small terms lost in large reductions", TENSORS.name),
    ("dimension_imbalance", "ranges that differ along a dimension", TENSORS.name),
    ("activation_range", "activations near FP16's limit", ACTIVATIONS.name),
    ("type_mismatch", "manual casts and losses outside autocast", ""),
    ("optimizer_state", "Adam's epsilon and updates lost in rounding", OPTIMIZER.name),
)
"""Causes of the taxonomy, and the family of columns without which a record cannot show them."""


def not_measured(families: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Return (name, text) of what a record with these families neither shows nor rules out."""
    return tuple((name, text) for name, text, family in _UNMEASURED if family not in families)


@dataclass(frozen=True, slots=True)
class Argument:
    """One observation for or against a cause."""

    text: str
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A cause with its evidence. Empty strings for what no evidence identifies."""

    cause: Cause
    sequence: int
    """First step at which it appears, counted since the probe attached."""
    step: int
    """The same step in the trainer's count."""
    rank: str = ""
    layer: str = ""
    phase: str = ""
    arguments_for: tuple[Argument, ...] = ()
    arguments_against: tuple[Argument, ...] = ()
    alerts: tuple[str, ...] = ()
    """Conditions that show it and held at severity critical or warning."""
    follows: str = ""
    """Name of the cause that explains this one; empty when nothing found does."""

    @property
    def score(self) -> int:
        """Total weight of the arguments for it, less that of those against it."""
        return sum(a.weight for a in self.arguments_for) - sum(
            a.weight for a in self.arguments_against
        )

    @property
    def likelihood(self) -> str:
        """Return likely, possible or unlikely; `consequence` where another cause explains it."""
        if self.follows:
            return "consequence"
        if self.score >= LIKELY:
            return "likely"
        return "possible" if self.score >= POSSIBLE else "unlikely"

    @property
    def place(self) -> str:
        """Rank, layer and phase as far as they are known, as text."""
        named = (("rank", self.rank), ("layer", self.layer), ("phase", self.phase))
        return ", ".join(f"{what} {value}" for what, value in named if value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSample:
    """All layers at one sampled step, in module order: values [L, C], finite."""

    sequence: int
    names: tuple[str, ...]
    columns: tuple[str, ...]
    values: FloatArray
    complete: bool
    """Whether every shard of every tensor was present."""

    def column(self, name: str) -> FloatArray:
        """Return one column [L]; zeros when the probe did not measure it."""
        if name not in self.columns:
            return np.zeros(len(self.names))
        column: FloatArray = self.values[:, self.columns.index(name)]
        return column

    @property
    def zero_shares(self) -> FloatArray:
        """Shares of the elements that are exactly 0 [L]."""
        shares: FloatArray = self.column("zero_elements") / self.column("elements").clip(1.0)
        return shares

    @property
    def nonfinite(self) -> FloatArray:
        """NaN and Inf elements per layer [L]."""
        elements: FloatArray = self.column("nan_elements") + self.column("inf_elements")
        return elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What the account compared a step with, from the steps before it; None where not known."""

    loss: float | None
    loss_bound: float | None
    """A loss above it is unusual."""
    norm: float | None
    loss_above: bool
    exploded: bool
    """Whether the norm was far above the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunHistory:
    """Steps and tables ascend; tables may precede the first step kept."""

    steps: tuple[MergedStep, ...]
    tables: tuple[LayerSample, ...] = ()
    families: frozenset[str] = frozenset()
    """Those of which anything was measured."""
    first_nonfinite: FirstNonfinite | None = None
    """Where the latest incident began, as the live agent reports it."""
    first_nonfinite_sequence: int = 0
    conditions: tuple[ActiveCondition, ...] = ()
    """Those that these steps had, at any time, as the detector judges them."""
    usual: Mapping[int, Usual] = field(default_factory=dict)
    """By sequence number."""
