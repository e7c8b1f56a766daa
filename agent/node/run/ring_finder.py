"""Finds new rings of a run, and refuses those that cannot be read."""

import logging
from collections.abc import Iterator
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader

log = logging.getLogger("mp_agent.node")


class RingFinder:
    """Scans a run's directory; opens each ring once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._seen: set[Path] = set()
        self.refused = 0
        """Rings that cannot be read: other version, truncated, foreign owner."""

    def new_rings(self) -> Iterator[tuple[Path, RingReader]]:
        """Yield the rings that appeared since the last call."""
        for path in locations.find_rings(self._run_dir):
            if path in self._seen:
                continue
            try:
                reader = RingReader.open(path)
            except FileNotFoundError:
                continue
            except (RingError, OSError) as error:
                self.refused += 1
                log.error("refused a ring: %s", error)
            else:
                yield path, reader
            self._seen.add(path)

    @property
    def known(self) -> tuple[Path, ...]:
        """All rings that were found so far."""
        return tuple(self._seen)

    def has_new(self) -> bool:
        """Return whether there is a ring that was not opened yet."""
        return bool(set(locations.find_rings(self._run_dir)) - self._seen)


def remove_ring(path: Path) -> None:
    """Delete a ring's file, and its directory if that is empty then."""
    try:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    except OSError:
        return
