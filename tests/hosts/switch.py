"""What connects hosts: a bridge in a network namespace of its own, with a veth pair to each."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.waiting import wait_until

_BRIDGE = "switch"


class Switch:
    """Its ports have the names of the hosts that they lead to."""

    def __init__(self, pid: int) -> None:
        """Set the bridge up in the network namespace of process `pid`."""
        self._pid = pid
        self._run("ip", "link", "add", _BRIDGE, "type", "bridge")
        self._run("ip", "link", "set", _BRIDGE, "up")

    def connect(self, port: str, pid: int) -> None:
        """Give the network namespace of process `pid` an `eth0` that leads here."""
        self._run(
            *("ip", "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", str(pid)),
        )
        self._run("ip", "link", "set", port, "master", _BRIDGE, "up")

    def cut(self, port: str) -> None:
        """Forward nothing from and to a port, which stays up."""
        self._run("ip", "link", "set", port, "nomaster")

    def restore(self, port: str) -> None:
        """Forward again."""
        self._run("ip", "link", "set", port, "master", _BRIDGE)

    def _run(self, *command: str) -> None:
        subprocess.run(
            ["nsenter", f"--target={self._pid}", "--net", "--", *command],
            check=True,
            capture_output=True,
            text=True,
        )


@contextmanager
def switch() -> Iterator[Switch]:
    """Make a switch; it and all its cables are gone when the `with` ends."""
    # Also when the test itself is killed, and cannot clean up.
    dying_with_us = ("setpriv", "--pdeathsig", "KILL", "--")
    holder = subprocess.Popen([*dying_with_us, "unshare", "--net", "--", "sleep", "infinity"])
    outside = os.readlink("/proc/self/ns/net")
    try:
        wait_until(
            lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != outside,
            what="a network namespace",
        )
        yield Switch(holder.pid)
    finally:
        holder.kill()
        holder.wait()
