"""Logging of a node agent: to a small rotating file if detached, else to stderr."""

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from mp_agent.errors import RingError
from mp_agent.inputs.addresses import shown_message
from mp_agent.inputs.files import printable
from mp_agent.ring.files import make_private_directory

_BYTES_MAX = 1_000_000
_KINDS_AT_MOST = 100
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def log_to_file(directory: Path, name: str) -> None:
    """Log to `<directory>/<name>.log`, at most two files of 1 MB; drop logs if that fails."""
    handler: logging.Handler = logging.NullHandler()
    try:
        make_private_directory(directory)
        path = directory / f"{name}.log"
        if not path.is_symlink():
            handler = RotatingFileHandler(path, maxBytes=_BYTES_MAX, backupCount=1)
    except (OSError, RingError):
        pass
    _install(handler)


def log_to_stderr() -> None:
    """Log to this process's stderr."""
    _install(logging.StreamHandler())


def _install(handler: logging.Handler) -> None:
    handler.setFormatter(_OneLine(_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


class _OneLine(logging.Formatter):
    """Writes a message on one line, without credentials of addresses.

    Names in it, of runs and hosts, cannot forge another line.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(shown_message(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:
        return printable(shown_message(super().formatException(ei)), keep="\n")


class OncePerKind(logging.Filter):
    """Lets each kind of error through once, since clients can trigger one repeatedly.

    Client errors, such as malformed HTTP, are dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is the first of its kind."""
        if record.levelno < logging.ERROR:
            return True
        error = record.exc_info[0] if record.exc_info else None
        if error is not None and issubclass(error, HttpProcessingError):
            return False
        kind = (str(record.msg), "" if error is None else error.__name__)
        if kind in self._seen or len(self._seen) >= _KINDS_AT_MOST:
            return False
        self._seen.add(kind)
        return True
