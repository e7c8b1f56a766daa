"""How long a step usually takes."""

from dataclasses import dataclass, field

from mp_agent.node.account.medians import median

_STEPS = 64


@dataclass(slots=True, kw_only=True)
class Pace:
    """Remembers the last step times; a compilation or a checkpoint among them weighs nothing."""

    seconds: list[float] = field(default_factory=list)

    def fold(self, step_seconds: float | None) -> None:
        """Take a step's time in, if it is known."""
        if step_seconds is not None:
            self.seconds = [*self.seconds[1 - _STEPS :], step_seconds]

    @property
    def usual_seconds(self) -> float | None:
        """The median; None before the first."""
        return median(self.seconds) if self.seconds else None
