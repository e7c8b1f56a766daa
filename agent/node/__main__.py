"""`python -m mp_agent.node`: one node agent.

It acquires the run's lock and detaches before it imports anything large: its starter waits only a
few milliseconds until the run has its agent.
"""

import argparse
import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.ring.files import open_standard_streams
from mp_agent.ring.locations import hold_agent_lock

_GLIBC_OPTIONS = {-1: 64 * 1024, -3: 64 * 1024, -8: 1}
"""malloc.h: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in bytes, and M_ARENA_MAX."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node agent and return its exit code: 0 also when the run has one already."""
    options = _parse(arguments)
    open_standard_streams()
    lock_fd = None
    if options.run_dir is not None:
        try:
            lock_fd = hold_agent_lock(options.run_dir)
        except (OSError, RingError) as error:
            print(f"mp_agent.node: {error}", file=sys.stderr)
            return 1
        if lock_fd is None:
            return 0
    if options.ready_fd is not None:
        os.close(options.ready_fd)
    if options.detach and os.fork() > 0:
        # The child inherits the lock; this process must not run its exit handlers.
        os._exit(0)
    _work(options, lock_fd)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mp_agent.node", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--run-dir", type=Path, help="watch this run until it is over")
    what.add_argument("--dir", type=Path, help="watch all runs in this directory (setting: dir)")
    parser.add_argument(
        "--with-parent", action="store_true", help="with --dir: stop when the parent process ends"
    )
    parser.add_argument("--detach", action="store_true", help="continue in the background")
    parser.add_argument("--ready-fd", type=int, help="closed once the run has its agent")
    return parser.parse_args(arguments)


def _work(options: argparse.Namespace, lock_fd: int | None) -> None:
    # Its plugins are the ranks' own, and looking for them reads what every package declares.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if options.detach:
        os.setsid()
    # NumPy's BLAS would start a thread per core, with memory for each.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _limit_allocator()
    from mp_agent.node.main import end_process, watch_directory, watch_run

    if lock_fd is not None:
        watch_run(options.run_dir, lock_fd, detached=options.detach)
    else:
        watch_directory(options.dir, detached=options.detach, with_parent=options.with_parent)
    end_process(0)


def _limit_allocator() -> None:
    """Make glibc keep one arena and return what is freed: two threads hardly ever allocate at once.

    Other C libraries have no such options and are left as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, value in _GLIBC_OPTIONS.items():
            libc.mallopt(option, value)


if __name__ == "__main__":
    sys.exit(main())
