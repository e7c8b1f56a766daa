"""The port of a node agent: choice, listening socket and URL."""

import errno
import socket
from dataclasses import dataclass

from mp_agent.ring.address import DEFAULT_PORT, base_url, is_any_address, is_local

PORTS_TRIED = 16

_IPV4_LOOPBACK, _IPV6_LOOPBACK = "127.0.0.1", "::1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a node agent listens, and the URL under which this machine reaches it."""

    bind: str
    port: int
    tls: bool = False

    @property
    def shown(self) -> str:
        """The address for log lines."""
        if not is_any_address(self.bind):
            return self.url
        return f"all addresses, port {self.port}, here {self.url}"

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        host = self.bind
        if is_any_address(host):
            has_ipv4 = host != "::" and is_local(_IPV4_LOOPBACK)
            host = _IPV4_LOOPBACK if has_ipv4 else _IPV6_LOOPBACK
        return base_url(host, self.port, tls=self.tls)


def usual_ports() -> range:
    """Return the ports from which an agent chooses if none is set."""
    return range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED)


def open_listener(bind: str, port: int | None, *, earlier_port: int = 0) -> socket.socket:
    """Return a listening socket on `port`; for None, on the first free port from 9464 on.

    If the 16 ports that are usually scraped are all in use, any free port. earlier_port: that of
    the previous node agent; preferred if `port` is None, so that its clients find the successor.
    Raises OSError, naming address and port, if no port can be opened.
    """
    ports = (*usual_ports(), 0) if port is None else (port,)
    earlier = (earlier_port,) if earlier_port and not port else ()
    for candidate in (*earlier, *ports):
        try:
            return _listen(bind, candidate)
        except OSError as error:
            refusal = error
    tried = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} and later"
    raise OSError(refusal.errno, f"{bind or 'all addresses'}, port {tried}: {refusal.strerror}")


def _listen(bind: str, port: int) -> socket.socket:
    """Return a listening socket; for "", on all addresses of both families if available."""
    if not bind and socket.has_dualstack_ipv6():
        try:
            return socket.create_server((bind, port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    return socket.create_server((bind, port), family=family)
