"""A callback for Lightning's Trainer."""

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback

import mp_agent
from mp_agent.integrations import ConditionLog, numbers_of


class MpAgentLightningCallback(Callback):
    """Attaches mp_agent when fitting begins, and writes conditions to the trainer's loggers.

    On each rank it marks validation as a phase. Steps need no help: Lightning's own number is found
    by the probe, also under manual optimization, where several optimizers make one step. Rank 0
    logs a condition as `mp_agent/<name>`, 1 when it begins to hold and 0 when it ceases. Settings
    are those of `mp_agent.init`.

    Raises SettingError, naming field and value, when fitting begins with a setting that is wrong.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._conditions = ConditionLog()
        self._validation: AbstractContextManager[None] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to this process; the model is the module that is being fitted."""
        mp_agent.init(pl_module, **self._settings)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the phase."""
        self._leave_validation()
        self._validation = mp_agent.phase("validation")
        self._validation.__enter__()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the phase."""
        self._leave_validation()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the phase in which training was interrupted."""
        self._leave_validation()

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Log the conditions that have begun or ceased."""
        for event in self._conditions.taken():
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(numbers_of(event), step=trainer.global_step)

    def _leave_validation(self) -> None:
        if self._validation is not None:
            self._validation.__exit__(None, None, None)
            self._validation = None
