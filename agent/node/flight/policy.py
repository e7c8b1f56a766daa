"""Decides when a run's flight record is due: on a critical condition or a bad end."""

from dataclasses import dataclass, field

from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.steps import EndReason

COOL_DOWN_SECONDS = 600.0
"""A condition that fires again within this time triggers no further record."""
GATHER_SECONDS = 30.0
"""After a record, further conditions are collected for this long and share the next one."""

_BAD_ENDS = (EndReason.FAILED, EndReason.KILLED, EndReason.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Trigger:
    """Why a record is due."""

    reason: str
    trigger: StoredConditionEvent | None = None


@dataclass(slots=True)
class FlightPolicy:
    """Decides when a record of one run is due, and remembers for what there was one."""

    _pending: dict[str, StoredConditionEvent] = field(default_factory=dict)
    _notified_seconds: dict[str, float] = field(default_factory=dict)
    _last_seconds: float | None = None
    _ended_session: str | None = None

    def on_condition(self, event: StoredConditionEvent) -> None:
        """Note a critical condition that has begun; others are ignored."""
        if event.state == "firing" and event.condition.severity == "critical":
            self._pending.setdefault(event.condition.name, event)

    def due(self, end: EndReason, session: str, now_seconds: float) -> Trigger | None:
        """Return why a record is due now, assuming that it gets written; None if none is due.

        end, session: how the current attempt ended, and its identifier.
        """
        if end in _BAD_ENDS and self._ended_session != session:
            self._ended_session = session
            trigger = next(iter(self._pending.values()), None)
            self._note(now_seconds)
            return Trigger(end.name.lower(), trigger)
        self._pending = {
            name: event
            for name, event in self._pending.items()
            if now_seconds - self._notified_seconds.get(name, -COOL_DOWN_SECONDS)
            >= COOL_DOWN_SECONDS
        }
        last_seconds = self._last_seconds
        gathering = last_seconds is not None and now_seconds - last_seconds < GATHER_SECONDS
        if not self._pending or gathering:
            return None
        first = next(iter(self._pending.values()))
        self._note(now_seconds)
        return Trigger(first.condition.name, first)

    def _note(self, now_seconds: float) -> None:
        self._notified_seconds.update(dict.fromkeys(self._pending, now_seconds))
        self._pending.clear()
        self._last_seconds = now_seconds
