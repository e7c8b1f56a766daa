"""Sends condition events to the log, to listeners in the agent, and to the ranks of all nodes."""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from mp_agent.errors import ReportError
from mp_agent.node.conditions.messages import log_event
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.ring.conditions_file import (
    ConditionNews,
    decode_news,
    encode_news,
    read_conditions,
    write_conditions,
)

log = logging.getLogger("mp_agent.node")

NEWS_SECONDS = 60.0
"""Time for which events are sent to other nodes, each of which reports every few seconds."""

Listener = Callable[[StoredConditionEvent], None]


class FailureLog:
    """Logs each kind of failure once."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, message: str, subject: object) -> None:
        """Log the current exception; `message` identifies its kind."""
        if message not in self._known:
            self._known.add(message)
            log.exception(message, subject)


class ConditionNotifier:
    """Sends the events of one run, in order."""

    def __init__(self, run_dir: Path, failures: FailureLog) -> None:
        """Continue the file for the ranks that an earlier node agent wrote, if there is one."""
        self._run_dir = run_dir
        self._failures = failures
        self._news = read_conditions(run_dir) or ConditionNews(epoch=secrets.token_hex(8))
        self._notified_seconds = float("-inf")
        self._adopted = b""
        self.listeners: list[Listener] = []
        """Called with every event; what one raises is logged."""

    def notify(self, event: StoredConditionEvent, now_seconds: float) -> None:
        """Log an event and call the listeners; `publish` sends it to the ranks."""
        self._notified_seconds = now_seconds
        log_event(event)
        self._news = self._news.with_event(event)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                self._failures.note("%r failed on a condition", listener)

    def publish(self) -> None:
        """Write the events to the file that the ranks of this node read."""
        try:
            write_conditions(self._run_dir, self._news)
        except OSError as error:
            self._failures.note("conditions cannot be sent to the ranks: %s", error.strerror)

    def recent_news(self, now_seconds: float) -> bytes:
        """Return the last events for other nodes; b"" once they are older than `NEWS_SECONDS`."""
        if now_seconds - self._notified_seconds > NEWS_SECONDS:
            return b""
        return encode_news(self._news)

    def adopt_from_root(self, content: bytes) -> None:
        """Publish the root's events to the ranks of this node; b"" means none."""
        if not content or content == self._adopted:
            return
        self._adopted = content
        try:
            self._news = decode_news(content)
        except ReportError:
            message = "the root sent conditions that cannot be decoded: %s"
            self._failures.note(message, content[:100])
        else:
            self.publish()
