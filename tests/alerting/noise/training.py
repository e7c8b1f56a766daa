"""A simple model of a training job: a falling loss, norms that jitter, GradScaler's algorithm."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import Any

from tests.alerting.noise.events import Step

FP16_MAX = 65504.0


@dataclass(slots=True, kw_only=True)
class Scaler:
    """PyTorch's GradScaler: halved on overflow, doubled after so many clean steps."""

    scale: float = 65536.0
    growth_interval: int = 2000
    floor: float = 0.0
    clean: int = 0

    def step(self, *, overflows: bool) -> tuple[float, bool]:
        """Return the scale in force during the step, and whether the step is skipped."""
        in_force = self.scale
        if overflows:
            self.scale, self.clean = max(self.scale / 2, self.floor), 0
        else:
            self.clean += 1
            if self.clean == self.growth_interval:
                self.scale, self.clean = self.scale * 2, 0
        return in_force, overflows


@dataclass(slots=True, kw_only=True)
class Training:
    """Yields steps; what differs from a healthy one is given by keyword.

    loss: where it begins; it falls towards `final_loss` over some `steps_to_learn`.
    largest: the magnitude of the largest gradient, which overflows FP16 when it is scaled.
    """

    random: Random
    seconds: float = 4.0
    norm: float = 1.0
    norm_spread: float = 0.15
    loss: float = 2.4
    final_loss: float = 1.9
    loss_noise: float = 0.02
    steps_to_learn: float = 3000.0
    clip: float | None = 1.0
    scaler: Scaler | None = None
    largest: float = 0.2
    first_step: int = 0
    learning_rate: float = 3e-4
    made: int = field(default=0, init=False)

    def step(self, **changes: Any) -> Step:
        """Return the next step."""
        self.made += 1
        excess = (self.loss - self.final_loss) * exp(-self.made / self.steps_to_learn)
        step: dict[str, Any] = {
            "seconds": self.seconds * self.random.lognormvariate(0, 0.03),
            "norm": self.norm * self.random.lognormvariate(0, self.norm_spread),
            "loss": self.final_loss + excess + self.random.gauss(0, self.loss_noise),
            "clip": self.clip,
            "learning_rate": self.learning_rate,
            "step": self.first_step + self.made if self.first_step else None,
        }
        if self.scaler is not None:
            largest = self.largest * self.random.lognormvariate(0, 0.25)
            overflows = largest * self.scaler.scale > FP16_MAX
            step["scale"], step["skipped"] = self.scaler.step(overflows=overflows)
            step["inf_elements"] = 5.0 * overflows
        return Step(**{**step, **changes})

    def steps(self, count: int, **changes: Any) -> Iterator[Step]:
        """Yield so many steps."""
        for _ in range(count):
            yield self.step(**changes)

    def minutes(self, minutes: float, **changes: Any) -> Iterator[Step]:
        """Yield steps for about so long."""
        yield from self.steps(round(minutes * 60 / self.seconds), **changes)

    def forever(self, **changes: Any) -> Iterator[Step]:
        """Yield steps without end."""
        while True:
            yield self.step(**changes)
