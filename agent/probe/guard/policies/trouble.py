"""When trouble repeats, and how often the slower policies may act on it."""

from collections import deque
from typing import NamedTuple

from mp_agent.catalog.guard import Values


class ObservedUpdate(NamedTuple):
    """What the slower policies see of an update. Of several in a step the first begins it."""

    is_trouble: bool
    begins_step: bool = True
    is_urgent: bool = False
    """Trouble that sets a policy off at once."""


class TroubleTrigger:
    """Sets a policy off: enough troubled steps within some steps, and not too often."""

    def __init__(self, values: Values) -> None:
        self._troubles = int(values["troubles"])
        self._trouble_steps = int(values["trouble_steps"])
        self._actions_max = int(values["actions_max"])
        self._window_steps = int(values["window_steps"])
        self._step = 0
        self._troubled: deque[int] = deque()
        self._last_troubled = 0
        self._acted: deque[int] = deque()
        self.is_none_left = False
        """The last update would have set the policy off, which had acted too often."""

    def observe(self, update: ObservedUpdate) -> bool:
        """Add an update; return whether the policy is to act."""
        self._step += update.begins_step
        self.is_none_left = False
        _drop_before(self._troubled, self._step - self._trouble_steps + 1)
        _drop_before(self._acted, self._step - self._window_steps + 1)
        is_known = self._last_troubled == self._step and not update.is_urgent
        if not update.is_trouble or is_known:
            return False
        self._last_troubled = self._step
        self._troubled.append(self._step)
        if len(self._troubled) < self._troubles and not update.is_urgent:
            return False
        self._troubled.clear()
        self.is_none_left = len(self._acted) >= self._actions_max
        if not self.is_none_left:
            self._acted.append(self._step)
        return not self.is_none_left


def _drop_before(steps: deque[int], first: int) -> None:
    while steps and steps[0] < first:
        steps.popleft()
