"""When to try again: later each time, and not all at the same moment."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

_FIRST_SECONDS = 0.5
_GROWTH = 2.0
LONGEST_SECONDS = 10.0
LONGEST_AT_END_SECONDS = 2.0
"""At the end of a run, when a rank may be waiting."""


@dataclass(slots=True)
class Backoff:
    """Pauses between tries that fail, doubled each time, each shortened by up to half."""

    chance: Callable[[], float] = random.random
    longest_seconds: float = LONGEST_SECONDS
    _failures: int = 0

    def next_pause_seconds(self, *, at_end: bool = False) -> float:
        """Note a failure and return how long to pause after it."""
        longest = min(self.longest_seconds, LONGEST_AT_END_SECONDS if at_end else inf)
        # Bounded: after a day without a network the power would be no float any more.
        pause_seconds = _FIRST_SECONDS * _GROWTH ** min(self._failures, 32)
        self._failures += 1
        return min(pause_seconds, longest) * (1.0 - 0.5 * self.chance())

    def reset(self) -> None:
        """Forget the failures: it worked."""
        self._failures = 0
