"""The one port of a node agent."""

import socket
from dataclasses import dataclass

from mp_agent.ring.address import DEFAULT_PORT, base_url

PORTS_TRIED = 16

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a node agent listens, and the URL under which this machine reaches it."""

    bind: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return base_url(_ANY_ADDRESS.get(self.bind, self.bind), self.port, tls=self.tls)


def open_listener(bind: str, port: int | None, *, earlier_port: int = 0) -> socket.socket:
    """Return a listening socket on `port`; on None, the first free one from 9464 on.

    earlier_port: of the node agent before this one; kept, where the choice is free, so that
    whoever knows it finds its successor. Raises OSError, naming address and port, when none can
    be had.
    """
    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if port is None else (port,)
    earlier = (earlier_port,) if earlier_port and not port else ()
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    for candidate in (*earlier, *ports):
        try:
            return socket.create_server((bind, candidate), family=family)
        except OSError as error:
            refusal = error
    tried = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    raise OSError(refusal.errno, f"{bind}, port {tried}: {refusal.strerror}")
