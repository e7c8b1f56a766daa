"""The node agent's HTTP server: /metrics and /healthz, and what else it is given to serve."""

import asyncio
import gzip
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web
from prometheus_client.exposition import gzip_accepted

from mp_agent.catalog.snapshot import Snapshot
from mp_agent.exporters.prometheus import render
from mp_agent.node.access import Access
from mp_agent.node.connections import (
    CONNECTIONS_AT_MOST,
    GuardedListener,
    connections_for,
)

_SHUTDOWN_SECONDS = 1.0
_COMPRESSION_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Exposure:
    """A snapshot, and whom to tell once a scraper has it."""

    snapshot: Snapshot
    delivered: Callable[[str, float], None]
    """Called with the scraper's name and the seconds that rendering took."""


class MetricsServer:
    """Serves what `expose` returns; called in the event loop, once per scrape."""

    def __init__(self, expose: Callable[[], Exposure], routes: Sequence[web.RouteDef] = ()) -> None:
        """Serve `routes` too, to those who do not scrape."""
        self._expose = expose
        self._routes = routes
        self._listener: GuardedListener | None = None
        self._agents = 0
        self._connections_at_most = CONNECTIONS_AT_MOST
        self._turn = asyncio.Lock()
        self._renderer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._runner: web.AppRunner | None = None

    async def start(
        self, listener: socket.socket, access: Access | None = None, *, metrics: bool = True
    ) -> None:
        """Serve on a listening socket; metrics: whether whoever wants may scrape."""
        access = access or Access()
        app = web.Application(middlewares=access.middlewares)
        if metrics:
            app.router.add_get("/metrics", self._metrics, allow_head=False)
        app.router.add_get("/healthz", _healthz)
        app.router.add_routes(self._routes)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = GuardedListener(
            self._runner.server, connections_at_most=self._connections_at_most
        )
        await self._listener.start(listener, access.tls)

    def expect(self, agents: int) -> None:
        """Make room for so many other node agents, each with a connection of its own."""
        if agents == self._agents:
            return
        self._agents, self._connections_at_most = agents, connections_for(agents)
        if self._listener is not None:
            self._listener.connections_at_most = self._connections_at_most

    async def stop(self) -> None:
        """Finish the answers under way, for a second at most, and close the port."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._renderer.shutdown(wait=False)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        # One after the other, so that a crowd of scrapers makes no crowd of snapshots.
        async with self._turn:
            exposure = self._expose()
            started = time.perf_counter()
            # In a thread: thousands of series take longer than a look at the rings may wait.
            body, headers = await asyncio.get_running_loop().run_in_executor(
                self._renderer,
                _encode,
                exposure.snapshot,
                request.headers.get("Accept", ""),
                request.headers.get("Accept-Encoding", ""),
            )
            seconds = time.perf_counter() - started
        response = web.Response(body=body, headers=headers)
        await response.prepare(request)
        await response.write_eof()
        exposure.delivered(f"{request.remote} {request.headers.get('User-Agent', '')}", seconds)
        return response


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _encode(snapshot: Snapshot, accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
    body, content_type = render(snapshot, accept)
    headers = {"Content-Type": content_type}
    if gzip_accepted(accept_encoding):
        body = gzip.compress(body, _COMPRESSION_LEVEL)
        headers["Content-Encoding"] = "gzip"
    return body, headers
