"""What a run's own past says of it: usual level and trend of its loss, ranks and layers behind."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLevel:
    """The usual loss. `deviation` is the median absolute one; a loss above the bound is unusual."""

    median: float
    deviation: float
    spike_bound: float


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
    """Layers whose gradient has died or underflows; some of them by name, in module order."""

    dead: int
    dead_names: tuple[str, ...]
    underflowing_share: float | None
    """Of the layers that are judged; None while none is."""
    underflowing_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """All of it; None for what is not known (yet)."""

    loss: LossLevel | None = None
    loss_trend: float | None = None
    """Rise from one long window to the next, in deviations."""
    usual_step_seconds: float | None = None
    straggler: Straggler | None = None
    laggards: tuple[Laggard, ...] = ()
    layers: TroubledLayers | None = None
    """None before any layer was looked at."""
