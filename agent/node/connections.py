"""Connections to the node agent's port: few enough, and none that stays without saying anything."""

import asyncio
import resource
import ssl
import time
from collections.abc import Callable
from socket import socket
from typing import cast

CONNECTIONS_AT_MOST = 256
QUIET_SECONDS_AT_MOST = 60.0
"""After so long without a byte in either direction a connection is cut: a client that stalls."""
HANDSHAKE_SECONDS = 10.0
_SWEEP_SECONDS = 5.0
_BACKLOG = 1024
"""The agents of a run start together, and knock at the root's door together."""
_OTHER_FILES = 256
"""Descriptors that are left for all that is no connection."""

ProtocolFactory = Callable[[], asyncio.Protocol]


class GuardedListener:
    """Accepts connections for `make_protocol`, and cuts those that are too many or too quiet.

    When there are too many, the one that was quiet for longest goes: whoever opens connections
    and leaves them half-open shuts nobody out.
    """

    def __init__(
        self,
        make_protocol: ProtocolFactory,
        *,
        connections_at_most: int = CONNECTIONS_AT_MOST,
        quiet_seconds_at_most: float = QUIET_SECONDS_AT_MOST,
    ) -> None:
        self._make_protocol = make_protocol
        self.connections_at_most = connections_at_most
        self._quiet_seconds_at_most = quiet_seconds_at_most
        self._open: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self, listener: socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept on a listening socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self._make_protocol(), self._open, self.connections_at_most),
            sock=listener,
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
        )
        self._sweep = loop.call_later(_SWEEP_SECONDS, self._cut_quiet)

    def close(self) -> None:
        """Accept no more; what is under way goes on."""
        if self._sweep is not None:
            self._sweep.cancel()
        if self._server is not None:
            self._server.close()

    def _cut_quiet(self) -> None:
        oldest = time.monotonic() - self._quiet_seconds_at_most
        for connection in [known for known in self._open if known.last_active_seconds < oldest]:
            connection.cut()
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(_SWEEP_SECONDS, self._cut_quiet)


def connections_for(agents: int) -> int:
    """Return how many connections to allow where so many other node agents push.

    Each keeps one open. Descriptors of the process are allowed for them, as far as the system
    grants any.
    """
    # Twice: a connection that was lost may still be open here when the next one comes.
    wanted = CONNECTIONS_AT_MOST + 2 * agents
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted + _OTHER_FILES:
        return wanted
    granted = wanted + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        granted = min(granted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    except (OSError, ValueError):
        granted = soft
    return min(wanted, max(granted - _OTHER_FILES, CONNECTIONS_AT_MOST))


class _Connection(asyncio.Protocol):
    """Hands everything on to the server's own protocol, and notes when something last moved."""

    def __init__(
        self, protocol: asyncio.Protocol, open_connections: "set[_Connection]", at_most: int
    ) -> None:
        self._protocol = protocol
        self._open = open_connections
        self._at_most = at_most
        self._transport: asyncio.Transport | None = None
        self.last_active_seconds = time.monotonic()

    def cut(self) -> None:
        """End the connection at once, whatever is still to be sent."""
        self._open.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        while len(self._open) >= self._at_most:
            min(self._open, key=lambda known: known.last_active_seconds).cut()
        self._open.add(self)
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.last_active_seconds = time.monotonic()
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Go on sending: the client has taken something."""
        self.last_active_seconds = time.monotonic()
        self._protocol.resume_writing()
