"""The end of a rank: what is open is written, the reason noted, the last state exported."""

import atexit
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.writer import RingWriter

_POLL_SECONDS = 0.05


class ExitWatch:
    """Learns how the interpreter ends, and calls `on_end(reason)` once, as late as it can.

    An uncaught exception or a non-zero `sys.exit` is FAILED, anything else that reaches the end of
    the interpreter COMPLETED. A process that is killed writes nothing: its lock tells.
    """

    def __init__(self, on_end: Callable[[EndReason], None]) -> None:
        self._on_end = on_end
        self._reason = EndReason.COMPLETED
        self._excepthook = sys.excepthook
        self._exit = sys.exit

    def install(self) -> None:
        """Attach to the ways out; earlier hooks are kept and called."""
        sys.excepthook = self._on_exception
        sys.exit = self._on_sys_exit  # type: ignore[assignment]
        atexit.register(self._at_exit)

    def remove(self) -> None:
        """Unhook, leaving alone what somebody else has hooked since."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if sys.exit == self._on_sys_exit:
            sys.exit = self._exit

    def _at_exit(self) -> None:
        self._on_end(self._reason)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._reason = EndReason.FAILED
        self._excepthook(kind, error, trace)

    def _on_sys_exit(self, status: object = None, /) -> None:
        self._reason = EndReason.COMPLETED if status in (None, 0, False) else EndReason.FAILED
        self._exit(status)  # type: ignore[arg-type]


def wait_for_export(
    writer: RingWriter, run_dir: Path, limit_seconds: float, otlp_limit_seconds: float = 5.0
) -> None:
    """Wait until the node agent's final state was exported, at most `limit_seconds`.

    Called by local rank 0 at a normal exit, for containers that end with the job. Waits for those
    who scrape and for the root agent, if it takes what this node pushes; for an OTLP endpoint at
    most `otlp_limit_seconds`; not when there was never any of them, or when the agent is gone.
    """
    status = locations.read_status(run_dir)
    if status is None or not (status.scrapes_total or status.pushes_total or status.otlp_pending):
        return
    writer.wait_for_export(True)
    deadline = time.monotonic() + limit_seconds
    otlp_deadline = time.monotonic() + otlp_limit_seconds
    while time.monotonic() < deadline and locations.agent_running(run_dir):
        status = locations.read_status(run_dir)
        if status is None:
            break
        pushed = not status.otlp_pending or time.monotonic() >= otlp_deadline
        if pushed and _delivered(status):
            break
        time.sleep(_POLL_SECONDS)
    writer.wait_for_export(False)


def _delivered(status: locations.AgentStatus) -> bool:
    return (status.final_exported or not status.scrapes_total) and (
        status.final_pushed or not status.pushes_total
    )
