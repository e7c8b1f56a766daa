"""What a tracker's module provides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker is to show it."""

    name: str
    directory: Path
    """Where a tracker keeps files on this machine; exists."""


class TrackerClient(Protocol):
    """One run in one tracker. Used by one thread; calls may block, and raise anything."""

    name: str
    """What the tracker calls the run."""
    url: str
    """Where the run can be seen: a page, or files on this machine; empty where neither is."""

    def log(self, values: Mapping[str, float], step: int, time_unix_seconds: float) -> None:
        """Send numbers of a step."""

    def close(self) -> None:
        """Send what is buffered, and mark the run as finished."""


OpenClient = Callable[[TrackedRun], TrackerClient]
