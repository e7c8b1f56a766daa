"""What `mp_agent.recommend` returns."""

from dataclasses import dataclass

from mp_agent.advice.environment import Environment
from mp_agent.advice.plan import PrecisionPlan

GOALS = ("speed", "memory", "stability")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReason:
    """Why a part of the plan is as it is."""

    subject: str
    """Such as `dtype`, `loss scale`, `keep in FP32`, `Adam epsilon`, `clip norm`."""
    value: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsideredPrecision:
    """A precision that was tried, in the order of the goal."""

    precision: str
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """The products, convolutions among them, of one call within a module's forward."""

    module: str
    operation: str
    dimensions: tuple[int, ...]
    """Those that tensor cores split into tiles: m, n and k of a product, channels per group of a
    convolution."""
    flops: int
    """Two for each multiplication and addition."""

    @property
    def odd(self) -> tuple[int, ...]:
        """Dimensions that are no multiple of 8, the tile of 16-bit tensor cores."""
        return tuple(dict.fromkeys(one for one in self.dimensions if one % 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class OddModule:
    """A module with dimensions that tensor cores pad or cannot use."""

    module: str
    dimensions: tuple[int, ...]
    flops_ratio: float
    """Share of the model's products that it computes with these dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFacts:
    """What the gradients of the measured FP32 steps showed."""

    steps: int
    norms: tuple[float, ...]
    """L2 norm over all parameters, per step."""
    losses: tuple[float, ...]
    abs_max: float
    """Largest magnitude of any gradient, of parameters or module outputs."""
    smallest_exponent: int | None
    """floor(log2) of the smallest magnitude that is not zero, of parameters; None for none."""
    zero_ratio: float
    """Share of elements of the parameters' gradients that are zero in FP32 already."""
    fp16_lost_ratio: float
    """Share of the others that become zero in FP16 without a loss scale."""
    fp16_lost_scaled_ratio: float | None
    """The same with the loss scale that was computed; None where there is none."""
    activation_lost_scaled_ratio: float | None
    """The same for the gradients of module outputs."""
    bf16_stale_ratio: float | None
    """Share of updates of AdamW that vanish where weights are in BF16; None if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes that a training step needs, by what they hold."""

    weights_bytes: int
    casts_bytes: int
    """Copies of weights in 16 bits that autocast keeps during a forward pass."""
    gradients_bytes: int
    optimizer_bytes: int
    """Two moments of Adam."""
    activations_bytes: int
    """What the forward pass saves for the backward pass, measured on this batch."""

    @property
    def total_bytes(self) -> int:
        """Return the sum."""
        return (
            self.weights_bytes
            + self.casts_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """An expected speed-up over FP32: an estimate, not a measurement."""

    least_ratio: float
    most_ratio: float
    eligible_ratio: float
    """Share of the products' operations that 16-bit tensor cores can use as they are."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The result of `mp_agent.recommend`."""

    plan: PrecisionPlan
    goal: str
    model: str
    """Name of its class."""
    parameters: int
    environment: Environment
    reasons: tuple[PlanReason, ...]
    considered: tuple[ConsideredPrecision, ...]
    gradients: GradientFacts
    odd_modules: tuple[OddModule, ...]
    memory_fp32: TrainingMemory
    memory_planned: TrainingMemory
    speed: SpeedEstimate | None
    """None where nothing is known to expect; the reasons say why."""
    notes: tuple[str, ...] = ()

    def code(self) -> str:
        """Return Python that trains by the plan, to paste."""
        from mp_agent.advice.report.code import code_of

        return code_of(self.plan)

    def as_json(self) -> str:
        """Return the recommendation as JSON; docs/recommend.md describes it."""
        from mp_agent.advice.report.document import as_json

        return as_json(self)
