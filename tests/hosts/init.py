"""The first process of a host: `unshare … python init.py NAME HOSTS`. When it is killed, all are.

It makes the host's own /proc, puts the file HOSTS in place of /etc/hosts, for torchrun looks up the
host's own name, says "ready" and then reaps, as an init does.
"""

import ctypes
import os
import signal
import socket
import sys

_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_MS_BIND = 4096


def main() -> None:
    socket.sethostname(sys.argv[1])
    mount(b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV_NOEXEC)
    mount(sys.argv[2].encode(), b"/etc/hosts", None, _MS_BIND)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()


def mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source, target, kind, flags, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target.decode())


if __name__ == "__main__":
    main()
