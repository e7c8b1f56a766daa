"""Captures warnings that a call logs, instead of showing them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def captured_warnings(log: logging.Logger) -> Iterator[list[str]]:
    """Collect the messages of level WARNING and above of a logger and its children."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector, propagate = Collector(logging.WARNING), log.propagate
    log.addHandler(collector)
    log.propagate = False
    try:
        yield messages
    finally:
        log.propagate = propagate
        log.removeHandler(collector)
