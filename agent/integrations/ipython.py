"""`%load_ext mp_agent` in a notebook: attaches to the kernel, prints the status page's address."""

from typing import Any

import mp_agent
from mp_agent.probe import api


class _Announcement:
    """Prints the address after the cell in which the node agent has begun to serve."""

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython

    def begin(self) -> None:
        """Look after each cell from now on."""
        self._ipython.events.register("post_run_cell", self.look)

    def look(self, *_: object) -> None:
        """Print the address once it is known."""
        if (address := api.status_url()) is not None:
            self.end()
            print(f"mp_agent: {address}")

    def end(self) -> None:
        """Look no more; harmless where it does not look."""
        callbacks = self._ipython.events.callbacks["post_run_cell"]
        if self.look in callbacks:
            self._ipython.events.unregister("post_run_cell", self.look)


_announcements: dict[int, _Announcement] = {}
"""Announcements by `id` of the shell."""


def load(ipython: Any) -> None:
    """See `mp_agent.load_ipython_extension`."""
    mp_agent.init()
    announcement = _announcements[id(ipython)] = _Announcement(ipython)
    if api.status_url() is None:
        print("mp_agent watches this kernel; the status page's address follows the first training")
    announcement.begin()
    announcement.look()


def unload(ipython: Any) -> None:
    """See `mp_agent.unload_ipython_extension`."""
    if (announcement := _announcements.pop(id(ipython), None)) is not None:
        announcement.end()
    mp_agent.shutdown()
