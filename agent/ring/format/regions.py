"""Where in a ring's file its bodies lie: new ones at its end, until it is large enough.

A file in shared memory that grew with every new schema would, in a sweep of many small trainings,
take the memory that data loaders need. So old bodies make room for new ones.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mp_agent.ring.format.layout import align

BYTES_KEPT = 14 << 20
"""Bodies may take so much in all before the oldest ones are used again; the newest two always."""


@dataclass(slots=True)
class Region:
    """A part of the file, with its mapping; `used` counts up with each use of any region.

    held: not to be used again yet. kept: to be mapped until the process ends. registered: known to
    the runtime of a device as memory that it may write to.
    """

    offset: int
    memory: memoryview
    used: int = 0
    held: bool = False
    kept: bool = False
    registered: bool = False


class Regions:
    """The regions of one file, which are mapped for good: a mapping holds a descriptor of it."""

    def __init__(self, fd: int, map_file: Callable[[int, int], memoryview]) -> None:
        self._fd = fd
        self._map = map_file
        self._regions: list[Region] = []
        self._uses = 0

    @property
    def all(self) -> Sequence[Region]:
        """All of them."""
        return self._regions

    def allocate(self, size_bytes: int) -> Region:
        """Return a region of at least `size_bytes`, all zero, that is not the one allocated last.

        Raises OSError when memory cannot be reserved; everything is then as it was.
        """
        held = sum(len(region.memory) for region in self._regions)
        region = None
        if held + size_bytes > BYTES_KEPT:
            region = self._oldest(size_bytes)
        if region is None:
            region = self._append(size_bytes)
        else:
            np.frombuffer(region.memory, dtype=np.uint8).fill(0)
        self._uses += 1
        region.used = self._uses
        return region

    def _oldest(self, size_bytes: int) -> Region | None:
        """Return the region that was allocated longest ago and is large enough."""
        fitting = [
            region
            for region in self._regions
            if len(region.memory) >= size_bytes and region.used < self._uses and not region.held
        ]
        return min(fitting, key=lambda region: region.used, default=None)

    def _append(self, size_bytes: int) -> Region:
        """Return a new region at the end of the file.

        Beyond what is kept anyway its size is a power of two, such that others fit into it later.
        """
        length = size_bytes
        if sum(len(region.memory) for region in self._regions) > BYTES_KEPT // 2:
            length = 1 << (length - 1).bit_length()
        offset = align(os.fstat(self._fd).st_size, mmap.ALLOCATIONGRANULARITY)
        os.posix_fallocate(self._fd, offset, length)
        region = Region(offset, self._map(offset, length))
        self._regions.append(region)
        return region
