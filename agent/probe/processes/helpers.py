"""Helper processes of a rank, which are no ranks although they may train."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import get_worker_info

from mp_agent.errors import RingError
from mp_agent.probe.processes.process_table import ancestors
from mp_agent.records.schema import RankIdentity
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader


def is_helper(
    identity: RankIdentity, directory: Path, *, asked_for: bool, numbered_by_environment: bool
) -> bool:
    """Return whether this process is no rank of its own, but a data worker or the like.

    A process group of its own makes a process a rank. One without has its rank's number only by
    inheritance where a rank above it has the same; a child of multiprocessing helps the rank above
    it, or is a daemon, unless `init()` was called for it (asked_for). directory: the setting `dir`.
    """
    if get_worker_info() is not None:
        return True
    if dist.is_available() and dist.is_initialized():
        return False
    is_child = multiprocessing.parent_process() is not None
    if numbered_by_environment and any(
        (above.rank, above.world_size) == (identity.rank, identity.world_size)
        for above in _ranks_above(directory)
    ):
        return True
    if asked_for or not is_child:
        return False
    return multiprocessing.current_process().daemon or any(_ranks_above(directory))


def _ranks_above(directory: Path) -> Iterator[RankIdentity]:
    """Yield the ranks among the processes above this one."""
    above = set(ancestors())
    if (parent := multiprocessing.parent_process()) is not None:
        above.add(parent.pid or 0)  # a fork server may stand in between
    for run_dir in locations.find_runs(directory):
        for path in locations.find_rings(run_dir):
            if (identity := _alive(path)) is not None and identity.pid in above:
                yield identity


def _alive(path: Path) -> RankIdentity | None:
    try:
        reader = RingReader.open(path)
    except (OSError, RingError):
        return None
    try:
        return reader.identity if reader.writer_alive() else None
    finally:
        reader.close()
