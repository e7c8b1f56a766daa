"""What a run's own past says of it: usual level and trend of its loss, ranks and layers behind."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLevel:
    """The usual loss. `deviation` is the median absolute one; a loss above the bound is unusual."""

    median: float
    deviation: float
    spike_bound: float
    noisy: bool = False
    """Whether losses far above the usual one are usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStanding:
    """The loss beside the best level that it ever had.

    lost_steps: losses since the run was found to have lost what it had learned; 0 while it has not.
    """

    best: float
    lost_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStanding:
    """The usual gradient norm of an optimizer, and the largest one that was usual at any time.

    below: steps in a row on which the norm was below each of the low thresholds, by name.
    """

    usual: float | None
    peak: float | None
    below: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that takes longest before its first collective of a step.

    slowdown: its time by the median of all ranks. delay_seconds: the difference.
    """

    rank: int
    slowdown: float
    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Laggard:
    """A rank that has not come as far as others.

    Its phase is `gone` when its process is, or when its node is not heard of.
    """

    rank: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubledLayers:
    """Layers whose gradient has died, underflows or explodes; some by name, in module order."""

    dead: int
    dead_names: tuple[str, ...]
    underflowing_share: float | None
    """Of the layers that are judged; None while none is."""
    underflowing_names: tuple[str, ...]
    exploding: int = 0
    exploding_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """All of it; None for what is not known (yet)."""

    loss: LossLevel | None = None
    loss_trend: float | None = None
    """Rise from one long window to the next, in deviations."""
    loss_rising_steps: int = 0
    """Losses in a row for which that rise was above its limit."""
    loss_standing: LossStanding | None = None
    norms: Mapping[str, NormStanding] = field(default_factory=dict)
    """By optimizer; the main one, or that of the whole model, under the empty name."""
    scaled_clip_steps: int = 0
    """Steps in a row whose clipping saw gradients still multiplied by the loss scale."""
    untrained: Mapping[str, int] = field(default_factory=dict)
    """Reason to the steps in a row for which nothing can have been learned."""
    usual_step_seconds: float | None = None
    straggler: Straggler | None = None
    laggards: tuple[Laggard, ...] = ()
    layers: TroubledLayers | None = None
    """None before any layer was looked at."""
