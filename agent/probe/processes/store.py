"""A client of the store at which the ranks of a job meet."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Protocol

_CONNECT_SECONDS = 10.0
_LISTENING = "0A"


class Store(Protocol):
    """What is used of `torch.distributed.TCPStore`; every method may raise RuntimeError."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """Return a value; waits until there is one."""

    def check(self, keys: list[str]) -> bool:
        """Return whether there are values, without waiting."""


def connect(host: str, port: int) -> Store:
    """Return a client of the store that listens there. Raises RuntimeError after some seconds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=_CONNECT_SECONDS)
    return TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def is_listened_on(port: int) -> bool:
    """Return whether a process of this machine listens on a TCP port."""
    return bool(listener_inode(port))


def listener_inode(port: int) -> str:
    """Return the inode of the socket that listens on a TCP port of this machine; "" for none."""
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                return fields[9]
    return ""
