"""Keeps secrets out of the logs: OTEL_* headers, passwords and queries of endpoints.

The exporters log headers that they cannot parse and URLs that they cannot reach. While a capture
is installed, their messages are kept here, redacted, and are read when a push fails.
"""

import logging
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qsl, unquote

LOGGERS = ("opentelemetry", "urllib3", "requests")
"""Of the exporters and the libraries they use."""

_SHOWN = "***"
_LENGTH_MIN = 3
"""Shorter words are no secrets, and replacing them would garble every message."""
_MESSAGES_KEPT = 4
_MESSAGE_CHARACTERS_MAX = 500


class Redactor:
    """Replaces, in any text, the secrets that the OTEL_* variables hold."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        words = {word for word in _secrets(variables) if len(word) >= _LENGTH_MIN}
        longest_first = sorted(words, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def redact(self, text: str) -> str:
        """Return `text` without the secrets, truncated to a reasonable log line."""
        return self._pattern.sub(_SHOWN, text)[:_MESSAGE_CHARACTERS_MAX]

    def __repr__(self) -> str:
        return "Redactor()"


class LogCapture(logging.Handler):
    """Diverts the exporters' log messages, and keeps each thread's last ones."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__(logging.WARNING)
        self._redactor = redactor
        self._messages: dict[int, deque[str]] = {}
        self._propagated: dict[str, bool] = {}

    def install(self) -> None:
        """Attach to the loggers and stop their propagation; idempotent."""
        for name in LOGGERS:
            if name in self._propagated:
                continue
            logger = logging.getLogger(name)
            self._propagated[name] = logger.propagate
            logger.propagate = False
            logger.addHandler(self)

    def remove(self) -> None:
        """Detach from the loggers and restore their propagation."""
        for name, propagated in self._propagated.items():
            logger = logging.getLogger(name)
            logger.removeHandler(self)
            logger.propagate = propagated
        self._propagated.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message, redacted, with its exception."""
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text = f"{text}: {record.exc_info[1]!r}"
        except Exception:
            # logging's own report of this would show the arguments.
            text = f"{record.name} logged a message that cannot be formatted"
        kept = self._messages.setdefault(threading.get_ident(), deque(maxlen=_MESSAGES_KEPT))
        if (redacted := self._redactor.redact(text)) not in kept:
            kept.append(redacted)

    def redact(self, text: str) -> str:
        """Return `text` without secrets."""
        return self._redactor.redact(text)

    def pop(self) -> str:
        """Return and forget the messages of this thread since the last call, oldest first."""
        return "; ".join(self._messages.pop(threading.get_ident(), ()))


def _secrets(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        if not name.startswith("OTEL_EXPORTER_OTLP"):
            continue
        if name.endswith("HEADERS"):
            yield from _header_secrets(value)
        elif name.endswith("ENDPOINT"):
            yield from _url_secrets(value)


def _header_secrets(value: str) -> Iterator[str]:
    """Yield every form in which a header's value may appear, well-formed or not."""
    for pair in value.split(","):
        # Also as a whole: without a name, all of it is the secret.
        yield pair.strip()
        secret = re.split("[=:]", pair, maxsplit=1)[-1].strip()
        for form in {secret, unquote(secret)}:
            yield form
            # `Bearer abc` and `Basic abc`: the second word is the secret.
            yield from form.split()[1:]


def _url_secrets(value: str) -> Iterator[str]:
    """Yield passwords and queries, even of an invalid URL."""
    address, _, query = value.partition("?")
    for userinfo in re.findall(r"[^/\s]+(?=@)", address):
        for part in (userinfo, *userinfo.split(":")):
            yield from (part, unquote(part))
    for _, secret in parse_qsl(query):
        yield secret
    yield query
