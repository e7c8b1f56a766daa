"""Waiting for what another process does, without guessing how long it takes."""

import time
from collections.abc import Callable
from typing import Literal, TypeVar

T = TypeVar("T")

BUSY_FACTOR = 6
"""How many times longer than on an idle machine everything may take."""


def wait_until(
    predicate: Callable[[], T | Literal[False, 0] | None],
    *,
    seconds: float = 10.0,
    what: str = "",
    interval_seconds: float = 0.02,
) -> T:
    """Return the predicate's first true value; AssertionError naming `what` when it does not come.

    seconds: how long it takes on an idle machine at most; a busy one gets `BUSY_FACTOR` times that,
    and the predicate is asked once more after the deadline.
    """
    deadline = time.monotonic() + seconds * BUSY_FACTOR
    while not (value := predicate()):
        if time.monotonic() > deadline:
            name = what or getattr(predicate, "__qualname__", "the predicate")
            raise AssertionError(f"waited {seconds * BUSY_FACTOR:g} s without success for {name}")
        time.sleep(interval_seconds)
    return value
