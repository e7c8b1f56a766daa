"""When to restart a node agent that died: soon at first, then after ever longer pauses."""

from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 30.0
"""Short against what a ring holds: 1 024 steps."""
HEALTHY_SECONDS = 20.0
"""After an agent has run for so long, deaths before it no longer count."""


@dataclass(slots=True)
class Restarts:
    """Counts consecutive deaths of one node agent; it never gives up."""

    deaths: int = 0
    """Since an agent was last healthy."""
    _next_start_seconds: float = 0.0
    _up_since_seconds: float | None = None
    _started: bool = False

    def saw_running(self, now_seconds: float) -> None:
        """Record that an agent is running at this moment."""
        if self._up_since_seconds is None:
            self._up_since_seconds = now_seconds
        self._started = True
        if now_seconds - self._up_since_seconds >= HEALTHY_SECONDS:
            self.deaths = 0

    def may_start(self, now_seconds: float, *, at_once: bool = False) -> bool:
        """Return whether to start an agent now that none runs, and count on its being started.

        at_once: there will be no later opportunity, so no pause is kept.
        """
        self._up_since_seconds = None
        if now_seconds < self._next_start_seconds and not at_once:
            return False
        self.deaths += self._started
        self._started = True
        self._next_start_seconds = now_seconds + self.pause_seconds
        return True

    @property
    def pause_seconds(self) -> float:
        """How long after a start the next one has to wait."""
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(self.deaths, 10), LONGEST_PAUSE_SECONDS)
