"""What the trackers of a run know of it: one record per subject, each made by one tracker."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.records.merged import MergedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestValues:
    """What was observed last. What is not measured on every step keeps its last value."""

    step: MergedStep | None = None
    """The last closed step."""
    judged: MergedStep | None = None
    """The last step with `gradients_judged`. Its sampled columns, if it did not measure any, are
    those of the last such step that did."""
    families: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same columns of each family, of the last step on which it counts."""
    sampled_steps: Mapping[str, int] = field(default_factory=dict)
    """The trainer's step of which sampled columns, and layers, are; by family."""
    loss: float | None = None
    """Last merged loss that was finite on all ranks."""
    learning_rate: float | None = None
    value_steps: Mapping[str, int] = field(default_factory=dict)
    """The trainer's step of which `loss`, `loss_scale` and `learning_rate` are."""
    nonfinite_since: Mapping[str, int] = field(default_factory=dict)
    """`loss` and `gradients`, where the last one was NaN or Inf, to the first step from which on
    every one was."""
    layer_interval_shortest_steps: int | None = None
    """The shortest interval of layer samples so far: the one that was set, since it is only ever
    stretched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHistory:
    """The loss against its own history; None for what is not known (yet)."""

    median: float | None = None
    deviation: float | None = None
    """The median absolute one."""
    spike_bound: float | None = None
    """A loss above it is unusual."""
    trend: float | None = None
    """Rise from one long window to the next, in deviations."""
    fall: float | None = None
    """Fall of the mean from the earlier half of the last losses to the later one, in standard
    deviations of the latter."""
    rising_steps: int = 0
    """Consecutive losses for which that rise was above its limit."""
    best: float | None = None
    """The best level so far."""
    solved: bool = False
    """Whether it is next to nothing of what it was at first."""
    lost_steps: int | None = None
    """Losses since the run has lost what it had learned; 0 while it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleHistory:
    """The loss scale; None without one."""

    last: float | None = None
    initial: float | None = None
    calibrated: float | None = None
    """The first one after `calibration_steps` of the attempt."""
    consecutive_decreases: int = 0
    low_steps: Mapping[str, int] = field(default_factory=dict)
    """Threshold → consecutive steps after calibration with a scale that is low by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Signs that a run does not learn, or not what it should."""

    untrained: Mapping[str, int] = field(default_factory=dict)
    """Reason → consecutive steps that cannot have trained."""
    scaled_clip_steps: int = 0
    """Consecutive steps whose clipping saw gradients still multiplied by the loss scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopMistakes:
    """Mistakes in the order of the training loop, and autocast without effect.

    steps: mistake → consecutive steps. discarded: backwards of the last step whose gradients were
    cleared before they were used. fp32_share: of linear layers and convolutions under autocast, at
    the last sample. fp32_samples: consecutive ones on which it was above its limit.
    """

    steps: Mapping[str, int] = field(default_factory=dict)
    discarded: float | None = None
    fp32_share: float | None = None
    fp32_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStanding:
    """The usual gradient norm of an optimizer, and the largest that was ever usual.

    below: consecutive steps with a norm below each of the low thresholds, by name.
    deviation: the standard deviation of the last usual ones.
    """

    usual: float | None
    peak: float | None
    below: Mapping[str, int]
    deviation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank with the longest time before its first collective of a step.

    slowdown: its time divided by the median of all ranks. delay_seconds: the difference.
    """

    rank: int
    slowdown: float
    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Laggard:
    """A rank that is behind others.

    Its phase is `gone` if its process is gone, or its node has stopped reporting.
    """

    rank: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubledLayers:
    """Layers whose gradient has died, underflows or explodes; some by name, in module order."""

    dead: int
    dead_names: tuple[str, ...]
    underflowing_share: float | None
    """Share of the judged layers; None while none is judged."""
    underflowing_names: tuple[str, ...]
    exploding: int = 0
    exploding_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersWithoutGradient:
    """Trained layers that never had a gradient; some by name, in module order.

    share: of the layers that the run's optimizers hold and that are trained.
    """

    share: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParameters:
    """What the last looks at parameters have found; None before any.

    unheld: parameters that get gradients and that no optimizer holds. unchanged: those that did not
    change although they were to. cut_off: those of layers that feed others, and get no gradient.
    parted: those that were one parameter, or are to be. rounded_ratio: share of the elements in at
    most 16 bits that did not change; None also while the learning rate rises, or is far below its
    highest. rounding_loss: share of what the updates were to change there that rounding kept from
    changing, the smaller one of two comparisons in a row; None as rounded_ratio.
    resumed_without_state: steps before the attempt's first, where its optimizer has lost what it
    keeps. schedule_behind: those of them that a schedule of the learning rate has not counted.
    nothing_loaded: tensors of a checkpoint of which none fitted the model.
    """

    unheld: float | None = None
    unchanged: float | None = None
    cut_off: float | None = None
    parted: float | None = None
    rounded_ratio: float | None = None
    rounding_loss: float | None = None
    resumed_without_state: float | None = None
    schedule_behind: float | None = None
    nothing_loaded: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleMoments:
    """Layers whose gradients have outgrown the optimizer's second moments; some by name."""

    rms_max: float
    """The largest root of the mean of g²/v of any layer."""
    stale: int
    stale_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGrowth:
    """Logits against those of the run's past; None for what was not sampled (often enough).

    Growth is the last samples divided by the earlier ones. logsumexp_size: the largest magnitude of
    a log-sum-exp of the output logits. high_names: modules with attention logits above the limit.
    """

    attention_growth: float | None = None
    logsumexp_size: float | None = None
    logsumexp_growth: float | None = None
    high_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance:
    """Routers of mixtures of experts at their last sample; None where none shows it.

    entropy_min: the smallest mean entropy of any, 0 to 1. unused_max: the largest share of unused
    experts of any. collapsed: how many send most tokens to few experts; some by name.
    """

    entropy_min: float | None = None
    unused_max: float | None = None
    collapsed: int = 0
    collapsed_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scaling:
    """Layers whose FP8 scales from earlier steps do not fit their tensors.

    misscaled: how many. Some by name: saturated, beyond the format's largest number again and
    again; unused, so far below it that few of the format's binades are left.
    """

    misscaled: int
    saturated_names: tuple[str, ...] = ()
    unused_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Flushing:
    """Layers whose cast to FP8 rounds most of an input or a weight to zero, again and again.

    share: the largest one in the last sample. flushed: how many layers; some by name, with the
    operand.
    """

    share: float
    flushed: int = 0
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRows:
    """The tensors that the script watches."""

    columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of each, by name, as of its last sample."""
    names: int = 0
    """How many names it watches; the first ones are in `columns`."""
    sustained_steps: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Threshold → name → steps over which every sample was beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBatch:
    """One and the same batch at every look for so many steps, since one of the trainer's count.

    of_all: whether all ranks that are looked at have theirs again and again.
    """

    ranks: tuple[int, ...]
    step: int
    steps: int
    of_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBatches:
    """Ranks that have had another one's batch at every look, likewise."""

    ranks: tuple[int, ...]
    step: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleRows:
    """Ranks whose batches have a single row, and how many others, or earlier ones, have."""

    ranks: tuple[int, ...]
    usual_rows: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHealth:
    """What is wrong with the batches; None for what is not.

    doubled: of the last pairs of steps, those with the same batch, that several workers delivered.
    """

    repeated: RepeatedBatch | None = None
    doubled: int = 0
    shared: SharedBatches | None = None
    single: SingleRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OddRank:
    """A rank whose losses are unlike those of all others.

    steps: how many of its last losses are. loss: its highest, or its usual one. usual: the usual
    loss of the run. highest: that of all other ranks within the same steps.
    """

    rank: int
    steps: int
    loss: float
    usual: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NormGrowth:
    """The usual gradient norm against the lowest that was ever usual.

    growth: the factor between them; 0 where the learning rate, or a norm that was as high at first,
    explains it.
    """

    growth: float
    lowest: float
    usual: float
