"""What was logged while something was done, in place of showing it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(log: logging.Logger) -> Iterator[list[str]]:
    """Collect warnings and worse of a logger and of those below it."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ear, propagate = Ear(logging.WARNING), log.propagate
    log.addHandler(ear)
    log.propagate = False
    try:
        yield said
    finally:
        log.propagate = propagate
        log.removeHandler(ear)
