"""Calls the training script's functions that save a checkpoint when the guard asks for one."""

import logging
from collections.abc import Callable, Sequence

from mp_agent.ring.interruptions import pass_on

log = logging.getLogger("mp_agent")

CheckpointCallback = Callable[[int], object]
"""Gets the number of the step that has just ended."""


class CheckpointCallbacks:
    """Calls each with the step; what one raises is logged, counted and contained."""

    def __init__(
        self, callbacks: Sequence[CheckpointCallback], on_failure: Callable[[], None]
    ) -> None:
        """callbacks: may grow later. on_failure: called for each that raised."""
        self._callbacks = callbacks
        self._on_failure = on_failure

    def call(self, step: int) -> None:
        """Call all of them, in the order in which they were registered."""
        for callback in tuple(self._callbacks):
            try:
                callback(step)
            except Exception as error:
                pass_on(error)
                self._on_failure()
                log.warning(
                    "on_checkpoint_request: %s raised %s; training goes on",
                    getattr(callback, "__qualname__", type(callback).__qualname__),
                    type(error).__name__,
                    exc_info=True,
                )
