"""Calls functions of the script: on conditions, and to save a checkpoint."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from mp_agent.records.conditions import ConditionEvent, condition_event
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.run_files import conditions_path, read_conditions

log = logging.getLogger("mp_agent")

ConditionCallback = Callable[[ConditionEvent], object]

_LEVELS = {"critical": logging.CRITICAL, "warning": logging.WARNING, "info": logging.INFO}

_FAILURES_LOGGED = 20

_Signature = tuple[int, int, int]


class ConditionCallbacks:
    """Reads, from step to step, the conditions that the node agent publishes, and delivers them.

    What was published before it was created is not delivered: it concerns an earlier attempt.
    """

    def __init__(
        self,
        run_dir: Path,
        callbacks: Sequence[ConditionCallback],
        *,
        logs: bool,
        on_failure: Callable[[], None],
    ) -> None:
        """callbacks: may grow later. logs: log as well. on_failure: called for each that raised."""
        self._run_dir = run_dir
        self._callbacks = callbacks
        self._logs = logs
        self._on_failure = on_failure
        self._file: _Signature | None = None
        self._epoch, self._delivered = "", 0
        self._failures: set[str] = set()
        self.poll()

    def poll(self) -> tuple[ConditionEvent, ...]:
        """Return new conditions; mostly reads the file's date alone.

        A file that is missing, foreign or damaged has none.
        """
        signature = _signature(conditions_path(self._run_dir))
        if signature is None or signature == self._file:
            return ()
        self._file = signature
        news = read_conditions(self._run_dir)
        if news is None:
            return ()
        delivered = self._delivered if news.epoch == self._epoch else 0
        self._epoch, self._delivered = news.epoch, max(news.last_number, delivered)
        return tuple(condition_event(event) for event in news.after(delivered))

    def deliver(self, conditions: Sequence[ConditionEvent]) -> None:
        """Log the conditions and call the callbacks with each; what one raises is contained."""
        for condition in conditions:
            if self._logs:
                self._contain("logging", _log, condition)
            for callback in tuple(self._callbacks):
                self._contain(_name_of(callback), callback, condition)

    def _contain(self, name: str, callback: ConditionCallback, condition: ConditionEvent) -> None:
        try:
            callback(condition)
        except Exception as error:
            pass_on(error)
            self._on_failure()
            kind = f"{name} raised {type(error).__name__}"
            if kind not in self._failures and len(self._failures) < _FAILURES_LOGGED:
                self._failures.add(kind)
                log.warning("on_condition: %s; training goes on", kind, exc_info=True)


def _log(condition: ConditionEvent) -> None:
    if condition.state == "firing":
        log.log(
            _LEVELS.get(condition.severity, logging.WARNING),
            "%s (%s) since step %d: %s %s %s",
            condition.name,
            condition.severity,
            condition.since_step,
            condition.summary,
            condition.description,
            condition.remedy,
        )
    elif condition.state == "explained":
        log.log(
            _LEVELS.get(condition.severity, logging.WARNING),
            "%s (%s) since step %d: post-mortem: %s",
            condition.name,
            condition.severity,
            condition.since_step,
            condition.postmortem,
        )
    else:
        log.info("%s (%s) is over", condition.name, condition.severity)


def _name_of(callback: ConditionCallback) -> str:
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))


def _signature(path: Path) -> _Signature | None:
    """Return what changes when the file is replaced; None when there is none."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        pass_on(error)
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


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
