"""What delivers the steps of a new schema while steps of the one before are on their way."""

import time
from collections.abc import Callable

from mp_agent.probe.delivery.base import Delivery
from mp_agent.probe.delivery.ring_memory import STEP_SLOTS
from mp_agent.probe.step.observed_step import ObservedStep

_HELD_AT_MOST = STEP_SLOTS
"""Steps of new schemas that are held back before the device is no longer waited for."""


class SucceedingDelivery:
    """Holds steps back until those of the delivery before are in the ring, then begins the next.

    The ring takes records of one schema after the other. No step waits for the device: what the
    device has not brought after `_HELD_AT_MOST` more steps is counted as lost.
    """

    def __init__(
        self, before: Delivery, begin: Callable[[], Delivery], *, wants_all_layers: bool
    ) -> None:
        """begin: writes the new schema, and returns its delivery; called until it succeeds."""
        self.wants_all_layers = wants_all_layers
        self._current = before
        """The delivery before, which is let go of once the next one has begun."""
        self._begin = begin
        self._begun = False
        self._held: list[ObservedStep] = []
        self._open: ObservedStep | None = None

    @property
    def pending(self) -> int:
        """How much is not in the ring yet, of either schema."""
        return self._current.pending + len(self._held)

    @property
    def _held_in_all(self) -> int:
        """Steps that are held back here, and by the one before if that waits for another."""
        before = self._current
        return len(self._held) + (
            before._held_in_all if isinstance(before, SucceedingDelivery) else 0
        )

    def offer(self, step: ObservedStep, *, complete: bool) -> None:
        """Pass the step on, or hold it back."""
        if self._begun:
            self._current.offer(step, complete=complete)
            return
        self._open = None if complete else step
        if complete:
            self._held.append(step)
        if self._held_in_all >= _HELD_AT_MOST:
            self._current.abandon()
        self.collect()

    def collect(self) -> None:
        """Publish what has arrived; begin the next one when nothing is left of the one before."""
        self._current.collect()
        if not self._begun and not self._current.pending:
            self._succeed()

    def drain(self, limit_seconds: float) -> None:
        """Publish everything of both, waiting for the device at most `limit_seconds` in all."""
        deadline_seconds = time.monotonic() + limit_seconds
        if not self._begun:
            self._current.drain(limit_seconds)
            self._current.abandon()
            self._succeed()
        self._current.drain(max(0.0, deadline_seconds - time.monotonic()))

    def retire(self) -> None:
        """Forget the step under way."""
        self._open = None
        if self._begun:
            self._current.retire()

    def abandon(self) -> None:
        """Count what is on its way as lost."""
        self._current.abandon()

    def _succeed(self) -> None:
        self._current.retire()
        self._current = self._begin()
        self._begun = True
        held, self._held = self._held, []
        for step in held:
            self._current.offer(step, complete=True)
        if self._open is not None:
            self._current.offer(self._open, complete=False)
            self._open = None
