"""A tracker for accelerate's `log_with`."""

from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

import mp_agent
from mp_agent.integrations import ConditionLog, numbers_of


class MpAgentTracker(GeneralTracker):
    """Attaches mp_agent where it is made, which must be on every process, and takes what is logged.

    accelerate hands `accelerator.log` to trackers of the main process alone. tokens: name under
    which the script logs the tokens of all processes since the last time. logs_steps: whether its
    `step` is, after each step, the number of completed optimizer steps; mp_agent then counts on
    from it. Leave it off where the script logs by epoch or micro-batch. Other arguments are the
    settings of `mp_agent.init`.

    With `accelerator` set once there is one, its other trackers get the conditions, as
    `mp_agent/<name>`, 1 when one begins to hold and 0 when it ceases.

    Raises SettingError, naming field and value, for a setting that is wrong.
    """

    name = "mp_agent"
    requires_logging_directory = False

    def __init__(
        self, *, tokens: str = "tokens", logs_steps: bool = False, **settings: Any
    ) -> None:
        super().__init__()
        self.accelerator: Accelerator | None = None
        self._tokens = tokens
        self._logs_steps = logs_steps
        self._conditions = ConditionLog()
        mp_agent.init(**settings)

    @property
    def tracker(self) -> "MpAgentTracker":
        """The tracker itself; there is no other object behind it."""
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep nothing: a configuration is no metric."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Pass on tokens, and the step if it counts steps; pass conditions to other trackers."""
        tokens = values.get(self._tokens)
        following = step + 1 if self._logs_steps and step is not None else None
        mp_agent.observe(step=following, tokens=tokens if isinstance(tokens, int) else None)
        for event in self._conditions.taken():
            for other in self._others():
                other.log(numbers_of(event), step=None)

    def finish(self) -> None:
        """Keep watching: training may go on without trackers."""

    def _others(self) -> list[GeneralTracker]:
        if self.accelerator is None or not self.accelerator.is_main_process:
            return []
        return [tracker for tracker in self.accelerator.trackers if tracker is not self]
