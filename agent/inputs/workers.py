"""Processes that share a command's work, and end with it however it ends."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process


@contextmanager
def worker_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of new processes; where the block raises, they are ended at once.

    They also end when this process is killed, after which they would wait for ever. Use `submit`:
    what an interrupted `map` has cancelled would be a traceback of the pool's own thread.
    """
    # A fork would copy the locks that the caller's threads hold.
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_end_with_parent)
    with pool:
        try:
            yield pool
        except BaseException:
            # Else those that have begun, and some that wait, would be finished first.
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise


def _end_with_parent() -> None:
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
