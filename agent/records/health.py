"""Health of a run by its own history: loss level and trend, norms, slow ranks, failing layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLevel:
    """The usual loss. `deviation` is the median absolute one; a loss above the bound is unusual."""

    median: float
    deviation: float
    spike_bound: float
    noisy: bool = False
    """Whether losses far above the usual one are frequent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStanding:
    """The best level of the loss so far.

    lost_steps: losses since the run has lost what it had learned; 0 while it has not.
    """

    best: float
    lost_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStanding:
    """The usual gradient norm of an optimizer, and the largest that was ever usual.

    below: consecutive steps with a norm below each of the low thresholds, by name.
    """

    usual: float | None
    peak: float | None
    below: Mapping[str, int]


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
class Health:
    """The health of a run; None for what is not known (yet)."""

    loss: LossLevel | None = None
    loss_trend: float | None = None
    """Rise from one long window to the next, in deviations."""
    loss_rising_steps: int = 0
    """Consecutive losses for which that rise was above its limit."""
    loss_standing: LossStanding | None = None
    norms: Mapping[str, NormStanding] = field(default_factory=dict)
    """By optimizer; the main one, or that of the whole model, under the empty name."""
    scaled_clip_steps: int = 0
    """Consecutive steps whose clipping saw gradients still multiplied by the loss scale."""
    untrained: Mapping[str, int] = field(default_factory=dict)
    """Reason → consecutive steps that cannot have trained."""
    usual_step_seconds: float | None = None
    straggler: Straggler | None = None
    laggards: tuple[Laggard, ...] = ()
    layers: TroubledLayers | None = None
    """None before any layer was sampled."""
    without_gradient: LayersWithoutGradient | None = None
    """None before enough steps."""
    moments: StaleMoments | None = None
    """None before any layer with second moments was sampled."""
    logits: LogitGrowth | None = None
    """None before any was sampled."""
    routers: RouterBalance | None = None
    """None before any was sampled."""
    fp8: Fp8Scaling | None = None
    """None before any layer with delayed scaling was sampled."""
