"""Keeps secrets out of the logs: OTEL_* headers, passwords and queries of endpoints.

The exporters log headers that they cannot parse and URLs that they cannot reach. While a capture
is in place, what they log stays here, redacted, and is asked for when a push fails.
"""

import logging
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qsl, unquote

LOGGERS = ("opentelemetry", "urllib3", "requests")
"""Those of the exporters and of what they use."""

_SHOWN = "***"
_LENGTH_MIN = 3
"""Shorter words are no secrets, and replacing them would garble every text."""
_MESSAGES_KEPT = 4
_MESSAGE_CHARACTERS_MAX = 500


class Redactor:
    """Replaces, in any text, the secrets that the OTEL_* variables hold."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        words = {word for word in _secrets(variables) if len(word) >= _LENGTH_MIN}
        longest_first = sorted(words, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def redact(self, text: str) -> str:
        """Return `text` without the secrets, and not longer than a log line should be."""
        return self._pattern.sub(_SHOWN, text)[:_MESSAGE_CHARACTERS_MAX]

    def __repr__(self) -> str:
        return "Redactor()"


class LogCapture(logging.Handler):
    """Takes what the exporters log off their loggers, and keeps each thread's last messages."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__(logging.WARNING)
        self._redactor = redactor
        self._messages: dict[int, deque[str]] = {}
        self._propagated: dict[str, bool] = {}

    def install(self) -> None:
        """Stand between the loggers and everybody else's handlers; once is enough."""
        for name in LOGGERS:
            if name in self._propagated:
                continue
            logger = logging.getLogger(name)
            self._propagated[name] = logger.propagate
            logger.propagate = False
            logger.addHandler(self)

    def remove(self) -> None:
        """Let the loggers go."""
        for name, propagated in self._propagated.items():
            logger = logging.getLogger(name)
            logger.removeHandler(self)
            logger.propagate = propagated
        self._propagated.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message, redacted, with the exception that it came with."""
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text = f"{text}: {record.exc_info[1]!r}"
        except Exception:
            # logging's own report of this would show the arguments.
            text = f"{record.name} logged what cannot be formatted"
        kept = self._messages.setdefault(threading.get_ident(), deque(maxlen=_MESSAGES_KEPT))
        if (redacted := self._redactor.redact(text)) not in kept:
            kept.append(redacted)

    def redact(self, text: str) -> str:
        """Return `text` without secrets."""
        return self._redactor.redact(text)

    def take(self) -> str:
        """Return what this thread's exporters said since it last asked, oldest first."""
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
    """Yield every text in which a header's value might turn up, well-formed or not."""
    for pair in value.split(","):
        # As a whole too: without a name, all of it is the secret.
        yield pair.strip()
        secret = re.split("[=:]", pair, maxsplit=1)[-1].strip()
        for form in {secret, unquote(secret)}:
            yield form
            # `Bearer abc` and `Basic abc`: the second word is the secret.
            yield from form.split()[1:]


def _url_secrets(value: str) -> Iterator[str]:
    """Yield passwords and queries, of what is no valid URL as well."""
    address, _, query = value.partition("?")
    for userinfo in re.findall(r"[^/\s]+(?=@)", address):
        for part in (userinfo, *userinfo.split(":")):
            yield from (part, unquote(part))
    for _, secret in parse_qsl(query):
        yield secret
    yield query
