"""Whether this machine has its own host name, which `torchrun --standalone` and gloo need."""

import socket
import subprocess
import sys

_TIMEOUT_SECONDS = 30
_LOOK_UP = """
import socket

def is_own(family, address):
    with socket.socket(family) as listener:
        try:
            listener.bind((address[0], 0))
        except OSError:
            return False
    return True

found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
assert any(is_own(family, address) for family, *_, address in found)
"""


def host_name_problem() -> str | None:
    """Return in one line what is wrong and how to fix it; None when the host name is its own.

    A resolver may answer any name with an address of another machine, hence the attempt to bind.
    The look-up runs in a separate process: a resolver without a network may wait for minutes.
    """
    try:
        subprocess.run(
            [sys.executable, "-c", _LOOK_UP],
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.SubprocessError:
        name = socket.gethostname()
        return (
            f"this machine's host name {name!r} does not resolve to an address of its own, so "
            f"that torchrun would wait for minutes; add a line '127.0.0.1 {name}' to /etc/hosts"
        )
    return None
