"""Whether this machine's own host name resolves, which `torchrun --standalone` and gloo need."""

import socket
import subprocess
import sys

_TIMEOUT_SECONDS = 30
_LOOK_UP = "import socket; socket.getaddrinfo(socket.gethostname(), None)"


def host_name_problem() -> str | None:
    """Return in one line what is wrong and what mends it; None when the host name resolves.

    The look-up runs in a process of its own: a resolver without a network may wait for minutes.
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
            f"this machine's host name {name!r} does not resolve, so that torchrun would wait for "
            f"minutes; add a line '127.0.0.1 {name}' to /etc/hosts"
        )
    return None
