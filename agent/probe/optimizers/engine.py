"""The interface to a framework that steps optimizers by itself, with gradients of its own.

Such an engine hands the optimizer flat parts of master weights, clips and unscales in between, and
skips steps. It is asked, through this interface, before and after each step of its own.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch.optim import Optimizer

from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.scalars import Scalar


class Engine(Protocol):
    """An engine that is about to step, or has stepped. No method enters a collective."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that it steps; None when it has none."""

    @property
    def scaler_name(self) -> str:
        """The class that scales the loss; empty when nothing does."""

    def begin(self) -> "EngineStep":
        """Return what is known before a step."""

    def end(self) -> "EngineResult":
        """Return what became of the step."""


@runtime_checkable
class OwningEngine(Engine, Protocol):
    """An engine that keeps gradients of its own, and makes the plan of them."""

    def make_plan(self, label: str) -> MeasurementPlan:
        """Return what to measure, under the names of the model's own parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """What is known of an engine's step before it.

    loss_scale: of its scaler; None where none is in use.
    gradient_scale: by which the gradients are still scaled; None where they are not.
    completed: steps before this one, by the engine's own count; None where it has none.
    """

    loss_scale: Scalar | None
    gradient_scale: Scalar | None
    completed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """What became of an engine's step.

    skipped: None where only a missing step of the optimizer shows it.
    clip_max_norm: None where gradients are not clipped.
    norm: of the unscaled gradients of the whole model; None where each rank's own is enough.
    """

    skipped: bool | None
    clip_max_norm: float | None
    norm: Scalar | None
