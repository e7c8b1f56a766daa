"""What frameworks offer for hooking in, one module per framework, which alone imports it.

None is needed: without them, the probe's own hooks measure the same. They pass on what only the
framework knows, and write conditions into the framework's own log.
"""

from collections import deque
from collections.abc import Iterator

import mp_agent
from mp_agent.records.conditions import ConditionEvent

KEPT = 100


class ConditionLog:
    """Collects condition events until the framework logs; beyond `KEPT`, the oldest go."""

    def __init__(self) -> None:
        self._waiting: deque[ConditionEvent] = deque(maxlen=KEPT)
        mp_agent.on_condition(self._waiting.append)

    def taken(self) -> Iterator[ConditionEvent]:
        """Yield the events since the last call, oldest first."""
        while self._waiting:
            yield self._waiting.popleft()


def numbers_of(event: ConditionEvent) -> dict[str, float]:
    """Return an event as loggers of numbers take it: 1 when it begins to hold, 0 when it ceases."""
    return {
        f"mp_agent/{event.name}": float(event.state != "resolved"),
        "mp_agent/condition_step": float(event.step),
    }
