"""Bounds the connections to the node agent's port: their number, idle time and unsent data."""

import asyncio
import resource
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from socket import socket
from typing import cast

from aiohttp.web_protocol import RequestHandler

HANDSHAKE_SECONDS = 10.0
_PARTS_AT_MOST = 64
"""Reads in which a request that is answered at once arrives: each part has all of it read again."""


AnswerAtOnce = Callable[[bytes], bytes | None]
"""Returns the response to the request that has arrived on an idle connection; nothing while more of
it is to come, and None if it, and all that follows, is for the server's protocol."""


class Connection(asyncio.Protocol):
    """Forwards to the server's protocol what is not answered at once; records the last activity."""

    def __init__(
        self,
        protocol: asyncio.Protocol,
        open_connections: "set[Connection]",
        full: Callable[[], None],
        *,
        at_once: AnswerAtOnce | None = None,
        remote: str = "",
    ) -> None:
        """full: called when the write buffer is full; remote: the client's address."""
        self.remote = remote
        self._at_once = at_once
        self._arrived = b""
        """Of a request that may be answered at once."""
        self._parts = 0
        self._protocol = protocol
        self._open = open_connections
        self._open.add(self)
        self._full = full
        self._handshake: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.last_active_seconds = time.monotonic()

    def accept(self, accepted: socket, tls: ssl.SSLContext | None) -> None:
        """Start to serve an accepted socket, after the TLS handshake if there is one."""

        def connected(_: "asyncio.Task[None]") -> None:
            if self._transport is None:
                self._open.discard(self)
                accepted.close()

        self._handshake = asyncio.get_running_loop().create_task(self._connect(accepted, tls))
        self._handshake.add_done_callback(connected)

    async def _connect(self, accepted: socket, tls: ssl.SSLContext | None) -> None:
        seconds = None if tls is None else HANDSHAKE_SECONDS
        # Failed handshakes are not worth a log line.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self, accepted, ssl=tls, ssl_handshake_timeout=seconds
            )

    def abort(self) -> None:
        """Close the connection at once, discarding unsent data."""
        self._open.discard(self)
        if self._transport is not None:
            self._transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the server's protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._open.discard(self)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Answer, or forward, data of the client."""
        self.last_active_seconds = time.monotonic()
        if self._at_once is not None:
            data = self._arrived + data
            self._parts += 1
            answer = self._at_once(data) if self._parts <= _PARTS_AT_MOST else None
            if answer is not None:
                self._arrived, self._parts = (b"", 0) if answer else (data, self._parts)
                assert self._transport is not None
                self._transport.write(answer)
                return
            self._at_once, self._arrived = None, b""
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Close, but not before a request that is being answered is: the client may still read.

        TLS has no such half, for asyncio.
        """
        waiter = getattr(self._protocol, "_waiter", None)
        is_idle = waiter is not None and not waiter.done()
        assert self._transport is not None
        if is_idle or self._transport.get_extra_info("sslcontext") is not None:
            return self._protocol.eof_received()
        protocol = cast(RequestHandler, self._protocol)
        protocol._lingering_time = 0.0  # the rest of a body, for which it would wait, never comes
        protocol.close()
        return True

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the write buffer, which the client has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """Forward that the write buffer is full; until it is not, nothing is answered at once."""
        if self._at_once is not None and self._transport is not None:
            self._transport.pause_reading()
        self._protocol.pause_writing()
        self._full()

    def resume_writing(self) -> None:
        """Forward that the client has read from the write buffer."""
        self.last_active_seconds = time.monotonic()
        if self._at_once is not None and self._transport is not None:
            self._transport.resume_reading()
        self._protocol.resume_writing()


CONNECTIONS_AT_MOST = 256
IDLE_SECONDS_AT_MOST = 60.0
"""A connection without a byte in either direction for this long is closed."""
UNSENT_BYTES_AT_MOST = 64 * 2**20
"""Bound on unread data of all clients together."""
_SWEEP_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_BACKLOG = 1024
"""The agents of a run start together, and connect to the root together."""
_OTHER_FILES = 256
"""Descriptors reserved for everything but connections."""

ProtocolFactory = Callable[[], asyncio.Protocol]


class GuardedListener:
    """Accepts connections for `make_protocol`, and closes excess and idle ones.

    When there are too many, the longest idle one of the address with the most connections is
    closed, so that a client with many half-open connections does not lock others out. Connections
    count from accept on, before the TLS handshake. Unread data is bounded in the same way: beyond
    the limit, the clients that have not read for longest are closed.
    """

    def __init__(
        self,
        make_protocol: ProtocolFactory,
        *,
        at_once: AnswerAtOnce | None = None,
        connections_at_most: int = CONNECTIONS_AT_MOST,
        idle_seconds_at_most: float = IDLE_SECONDS_AT_MOST,
        unsent_bytes_at_most: int = UNSENT_BYTES_AT_MOST,
    ) -> None:
        self._make_protocol = make_protocol
        self._at_once = at_once
        self.connections_at_most = connections_at_most
        self._idle_seconds_at_most = idle_seconds_at_most
        self._unsent_bytes_at_most = unsent_bytes_at_most
        self._open: set[Connection] = set()
        self._listener: socket | None = None
        self._tls: ssl.SSLContext | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, listener: socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept on a listening socket; `close` closes it."""
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listener, self._tls = listener, tls
        self._resume()
        self._sweep()

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        if self._listener is None:
            return
        self._pause()
        self._listener.close()
        self._listener = None
        if self._timer is not None:
            self._timer.cancel()

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)

    def _accept(self) -> None:
        """Accept pending connections; when out of descriptors, close one and retry shortly."""
        assert self._listener is not None
        for _ in range(_BACKLOG):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError:
                self._abort_most_idle()
                self._pause()
                asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._resume)
                return
            while len(self._open) >= self.connections_at_most:
                self._abort_most_idle()
            connection = Connection(
                self._make_protocol(),
                self._open,
                self._bound_unsent,
                at_once=self._at_once,
                remote=str(address[0]),
            )
            connection.accept(accepted, self._tls)

    def _abort_most_idle(self) -> None:
        if not self._open:
            return
        connections = Counter(known.remote for known in self._open)
        most = max(connections.values())
        crowd = [known for known in self._open if connections[known.remote] == most]
        min(crowd, key=lambda known: known.last_active_seconds).abort()

    def _bound_unsent(self) -> None:
        unsent = {known: known.unsent_bytes for known in self._open if known.unsent_bytes}
        excess_bytes = sum(unsent.values()) - self._unsent_bytes_at_most
        for connection in sorted(unsent, key=lambda known: known.last_active_seconds):
            if excess_bytes <= 0:
                return
            excess_bytes -= unsent[connection]
            connection.abort()

    def _sweep(self) -> None:
        """Close idle connections, and those of many small unread answers, periodically."""
        oldest = time.monotonic() - self._idle_seconds_at_most
        for connection in [known for known in self._open if known.last_active_seconds < oldest]:
            connection.abort()
        self._bound_unsent()
        self._timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)


def connections_for(agents: int) -> int:
    """Return how many connections to allow when this many other node agents push.

    Each keeps one open. Raises the process's limit of descriptors accordingly, as far as permitted.
    """
    # Twice: a lost connection may still be open here when its successor arrives.
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
