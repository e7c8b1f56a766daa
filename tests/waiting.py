"""Waiting for what another process does, without guessing how long it takes."""

import time
from collections.abc import Callable
from typing import Literal, TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T | Literal[False, 0] | None],
    *,
    seconds: float = 10.0,
    what: str = "",
    interval_seconds: float = 0.02,
) -> T:
    """Return the predicate's first true value; AssertionError naming `what` after `seconds`.

    The predicate is asked once more after the deadline, so that a starved machine gets its chance.
    """
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        if time.monotonic() > deadline:
            name = what or getattr(predicate, "__qualname__", "the predicate")
            raise AssertionError(f"waited {seconds:g} s in vain for {name}")
        time.sleep(interval_seconds)
    return value
