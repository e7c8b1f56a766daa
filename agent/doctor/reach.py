"""Whether something listens at an address."""

import socket

_CONNECT_SECONDS = 3.0


def unreachable(host: str, port: int) -> str:
    """Return why no TCP connection comes about; "" when one does."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
