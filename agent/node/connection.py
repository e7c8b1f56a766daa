"""One connection to the node agent's port, from the moment in which it is accepted."""

import asyncio
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from socket import socket
from typing import cast

HANDSHAKE_SECONDS = 10.0


class Connection(asyncio.Protocol):
    """Hands everything on to the server's own protocol, and notes when something last moved."""

    def __init__(
        self,
        protocol: asyncio.Protocol,
        open_connections: "set[Connection]",
        full: Callable[[], None],
        *,
        remote: str = "",
    ) -> None:
        """Call `full` whenever the client takes too little of what is sent.

        remote: the client's address.
        """
        self.remote = remote
        self._protocol = protocol
        self._open = open_connections
        self._open.add(self)
        self._full = full
        self._greeting: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.last_active_seconds = time.monotonic()

    def greet(self, accepted: socket, tls: ssl.SSLContext | None) -> None:
        """Begin to talk over a socket, after a handshake if there is TLS."""

        def greeted(_: "asyncio.Task[None]") -> None:
            if self._transport is None:
                self._open.discard(self)
                accepted.close()

        self._greeting = asyncio.get_running_loop().create_task(self._greet(accepted, tls))
        self._greeting.add_done_callback(greeted)

    async def _greet(self, accepted: socket, tls: ssl.SSLContext | None) -> None:
        seconds = None if tls is None else HANDSHAKE_SECONDS
        # Of a handshake that fails nobody needs to hear.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self, accepted, ssl=tls, ssl_handshake_timeout=seconds
            )

    def cut(self) -> None:
        """End the connection at once, whatever is still to be sent."""
        self._open.discard(self)
        if self._transport is not None:
            self._transport.abort()
        elif self._greeting is not None:
            self._greeting.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the server begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._open.discard(self)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand on what the client says."""
        self.last_active_seconds = time.monotonic()
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Hand on that the client says no more."""
        return self._protocol.eof_received()

    @property
    def unsent_bytes(self) -> int:
        """What the client has asked for and not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """Wait for the client to take something."""
        self._protocol.pause_writing()
        self._full()

    def resume_writing(self) -> None:
        """Go on sending: the client has taken something."""
        self.last_active_seconds = time.monotonic()
        self._protocol.resume_writing()
