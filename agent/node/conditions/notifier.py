"""Who hears of a condition: the log, listeners in the agent, and the ranks of all nodes."""

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
"""How long events are told to other nodes, each of which reports every few seconds."""

Listener = Callable[[StoredConditionEvent], None]


class FailureLog:
    """Logs what fails, each kind the first time that it happens."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, message: str, subject: object) -> None:
        """Log the exception that is being handled; `message` is its kind."""
        if message not in self._known:
            self._known.add(message)
            log.exception(message, subject)


class ConditionNotifier:
    """Tells of the events of one run, in the order in which they come."""

    def __init__(self, run_dir: Path, failures: FailureLog) -> None:
        """Go on with the file for the ranks that an earlier node agent wrote, if there is one."""
        self._run_dir = run_dir
        self._failures = failures
        self._news = read_conditions(run_dir) or ConditionNews(epoch=secrets.token_hex(8))
        self._notified_seconds = float("-inf")
        self._adopted = b""
        self.listeners: list[Listener] = []
        """They hear of every event that is told; what one raises is logged."""

    def notify(self, event: StoredConditionEvent, now_seconds: float) -> None:
        """Tell the log and the listeners; `publish` tells the ranks."""
        self._notified_seconds = now_seconds
        log_event(event)
        self._news = self._news.with_event(event)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                self._failures.note("%r failed on a condition", listener)

    def publish(self) -> None:
        """Write down for the ranks of this node what was told."""
        try:
            write_conditions(self._run_dir, self._news)
        except OSError as error:
            self._failures.note("conditions cannot be told to the ranks: %s", error.strerror)

    def recent_news(self, now_seconds: float) -> bytes:
        """Return the last events for the ranks of other nodes; b"" once they must all know."""
        if now_seconds - self._notified_seconds > NEWS_SECONDS:
            return b""
        return encode_news(self._news)

    def adopt_from_root(self, content: bytes) -> None:
        """Tell the ranks of this node what the root's agent says; b"" says nothing."""
        if not content or content == self._adopted:
            return
        self._adopted = content
        try:
            self._news = decode_news(content)
        except ReportError:
            message = "the root told of conditions that cannot be read: %s"
            self._failures.note(message, content[:100])
        else:
            self.publish()
