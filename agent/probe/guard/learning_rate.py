"""Lowers the learning rate of some updates, and lets it come back."""

from mp_agent.catalog.guard import Values
from mp_agent.probe.guard.trouble import ObservedUpdate, TroubleTrigger


class RateReduction:
    """The factor of the learning rate: `rate_factor` for `hold_steps`, then up to 1 in as many."""

    def __init__(self, values: Values) -> None:
        self.trigger = TroubleTrigger(values)
        self._factor = float(values["rate_factor"])
        self._hold_steps = int(values["hold_steps"])
        self._steps_left = 0

    def observe(self, update: ObservedUpdate) -> bool:
        """Add an update; return whether the rate is lowered from now on."""
        if update.begins_step:
            self._steps_left = max(self._steps_left - 1, 0)
        begins = self.trigger.observe(update)
        if begins:
            self._steps_left = 2 * self._hold_steps
        return begins

    @property
    def factor(self) -> float:
        """What the rate of the next update is multiplied by; comes back in equal parts."""
        if self._steps_left >= self._hold_steps:
            return self._factor
        back = 1.0 - self._steps_left / self._hold_steps
        return self._factor + (1.0 - self._factor) * back
