"""The address under which other machines reach this one.

Nothing here sends a packet, save to a resolver.
"""

import socket
from typing import Any

from mp_agent.inputs.addresses import is_loopback

DEFAULT_PORT = 9464
"""Port of a node agent."""

_ANY_PORT = 9
_ANY_ADDRESSES = ("", "0.0.0.0", "::")


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the base URL of what listens at `host` and `port`."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_any_address(host: str) -> bool:
    """Return whether listening on `host` means every address of the machine."""
    return host in _ANY_ADDRESSES


def is_local(host: str) -> bool:
    """Return whether `host` is an address of this machine. May ask a resolver."""
    for family, address in _addresses(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))
                return True
            except OSError:
                continue
    return False


def address_toward(host: str) -> str:
    """Return the address from which this machine talks to `host`; "" when there is no way.

    May ask a resolver. Where `host` is this machine under a name that others know, and it resolves
    to a loopback address as /etc/hosts often has it, the name itself is returned.
    """
    for family, address in _addresses(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            own = str(probe.getsockname()[0])
            return host if is_loopback(own) else own
    return ""


def _addresses(host: str) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [(family, address) for family, _, _, _, address in found]
