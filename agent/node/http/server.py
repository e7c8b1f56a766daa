"""Answers scrapes and requests of the status page, on a port that it finds."""

import asyncio
import gzip
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web

from mp_agent.catalog.metric import Snapshot
from mp_agent.errors import SettingError
from mp_agent.exporters.prometheus import content_type, render
from mp_agent.node.endpoint import Endpoint, open_listener, usual_ports
from mp_agent.node.http.auth import Access, access
from mp_agent.node.http.connections import (
    CONNECTIONS_AT_MOST,
    AnswerAtOnce,
    GuardedListener,
    connections_for,
)
from mp_agent.node.logs import OncePerKind
from mp_agent.settings import Settings

_VERSIONS = ("0.0.1", "0.0.4", "1.0.0")
"""Of OpenMetrics and of Prometheus' text."""


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether a response may be compressed: `gzip` or `*` has a quality above 0.

    A named coding takes precedence over `*`; without any, the response is not compressed.
    """
    qualities = _qualities(accept_encoding)
    named = [qualities[name] for name in ("gzip", "x-gzip") if name in qualities]
    gzip = max(named, default=qualities.get("*", 0.0))
    # Explicitly preferred plain text is sent; with equal qualities gzip is shorter.
    return gzip > 0.0 and gzip >= qualities.get("identity", 0.0)


def wanted_types(accept: str) -> str:
    """Return an Accept header without the media types that cannot be had.

    Those that the client refuses by `q=0`, and those of other versions: the library would claim to
    answer in any, or fail.
    """
    parts = (part.strip() for part in accept.split(","))
    return ",".join(part for part in parts if part and _quality(part) > 0.0 and _has_version(part))


def _has_version(part: str) -> bool:
    return _parameter(part, "version", _VERSIONS[0]).strip('"') in _VERSIONS


def _qualities(header: str) -> Mapping[str, float]:
    """Return the quality of each token of a header, by its name in lower case."""
    parts = (part for part in header.split(",") if part.strip())
    return {part.partition(";")[0].strip().lower(): _quality(part) for part in parts}


def _quality(part: str) -> float:
    """Return the quality of a header's element; 1 by default, 0 if it is malformed."""
    return _number(_parameter(part, "q", "1"))


def _parameter(part: str, name: str, otherwise: str) -> str:
    """Return a parameter of a header's element; `otherwise` without one."""
    for parameter in part.split(";")[1:]:
        own, _, value = parameter.partition("=")
        if own.strip().lower() == name:
            return value.strip()
    return otherwise


def _number(text: str) -> float:
    """Return a quality value; 0 if it is malformed."""
    digits = text.replace(".", "", 1)
    if not (digits.isascii() and digits.isdigit()) or len(text) > 5:
        return 0.0
    return min(float(text), 1.0)


_SHUTDOWN_SECONDS = 1.0
_COMPRESSION_LEVEL = 1
_SCRAPER_CHARACTERS_MAX = 200
_FORMS_KEPT = 4

_http_log = logging.getLogger("mp_agent.node.http")
_http_log.addFilter(OncePerKind())


@dataclass(frozen=True, slots=True)
class Exposure:
    """A snapshot, and a callback for when a scraper has received it."""

    snapshot: Snapshot
    delivered: Callable[[str, float], None]
    """Called with the scraper's name and the seconds that rendering took."""


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A snapshot in one form: content type, compressed or not.

    It does not keep the snapshot, whose objects take several times the memory of the text.
    """

    delivered: Callable[[str, float], None]
    body: bytes
    headers: dict[str, str]
    begun_seconds: float
    """Monotonic time just before the snapshot."""
    seconds: float
    """Duration of rendering."""


async def _without_versions(_request: web.Request, response: web.StreamResponse) -> None:
    """Leave out the header that names the versions of aiohttp and Python."""
    response.headers.pop("Server", None)


class MetricsServer:
    """Serves the exposure that `expose` returns; it is called in the event loop."""

    def __init__(
        self,
        expose: Callable[[], Exposure],
        routes: Sequence[web.RouteDef] = (),
        at_once: AnswerAtOnce | None = None,
    ) -> None:
        """routes: further routes of the agent's services. at_once: answers some of them itself."""
        self._expose = expose
        self._routes = routes
        self._at_once = at_once
        self._listener: GuardedListener | None = None
        self._agents = 0
        self._connections_at_most = CONNECTIONS_AT_MOST
        self._turn = asyncio.Lock()
        self._last: dict[tuple[str, bool], _Rendering] = {}
        """Last rendering by content type and compression."""
        self._renderer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._runner: web.AppRunner | None = None

    async def start(
        self, listener: socket.socket, access: Access | None = None, *, metrics: bool = True
    ) -> None:
        """Serve on a listening socket; metrics: whether to serve /metrics."""
        access = access or Access()
        app = web.Application(middlewares=access.middlewares)
        if metrics:
            app.router.add_get("/metrics", self._metrics, allow_head=False)
        app.router.add_get("/healthz", _healthz)
        app.router.add_routes(self._routes)
        app.on_response_prepare.append(_without_versions)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            # The library would unpack any body in the event loop, without a limit.
            auto_decompress=False,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = GuardedListener(
            self._runner.server,
            at_once=self._at_once,
            connections_at_most=self._connections_at_most,
        )
        await self._listener.start(listener, access.tls)

    def expect(self, agents: int) -> None:
        """Allow connections for this many other node agents."""
        if agents == self._agents:
            return
        self._agents, self._connections_at_most = agents, connections_for(agents)
        if self._listener is not None:
            self._listener.connections_at_most = self._connections_at_most

    async def stop(self) -> None:
        """Finish pending responses within a second, and close the port."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._renderer.shutdown(wait=False)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        arrived_seconds = time.monotonic()
        accept = wanted_types(request.headers.get("Accept", ""))
        packed = accepts_gzip(request.headers.get("Accept-Encoding", ""))
        # Serialised, so that many concurrent scrapers do not cause as many snapshots.
        async with self._turn:
            if request.transport is None or request.transport.is_closing():
                return web.Response()
            rendering = self._last.get((content_type(accept), packed))
            # A rendering that began after this request arrived is recent enough for it.
            if rendering is None or rendering.begun_seconds < arrived_seconds:
                rendering = await self._render(accept, packed=packed)
        response = web.Response(body=rendering.body, headers=rendering.headers)
        try:
            await response.prepare(request)
            await response.write_eof()
        except ConnectionError:
            # The scraper has disconnected, and has not received the snapshot.
            return response
        remote = (request.remote or "").removeprefix("::ffff:")
        scraper = f"{remote} {request.headers.get('User-Agent', '')}"
        rendering.delivered(scraper[:_SCRAPER_CHARACTERS_MAX], rendering.seconds)
        return response

    async def _render(self, accept: str, *, packed: bool) -> "_Rendering":
        """Take a snapshot and render it, for all requests that wait for this form."""
        begun_seconds = time.monotonic()
        exposure = self._expose()
        started = time.perf_counter()
        # In a thread: rendering thousands of series would delay the polling of the rings.
        body, headers = await asyncio.get_running_loop().run_in_executor(
            self._renderer, _encode, exposure.snapshot, accept, packed
        )
        seconds = time.perf_counter() - started
        rendering = _Rendering(exposure.delivered, body, headers, begun_seconds, seconds)
        if len(self._last) >= _FORMS_KEPT:
            self._last.clear()
        self._last[content_type(accept), packed] = rendering
        return rendering


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _encode(snapshot: Snapshot, accept: str, packed: bool) -> tuple[bytes, dict[str, str]]:
    body, kind = render(snapshot, accept)
    headers = {"Content-Type": kind, "Vary": "Accept, Accept-Encoding"}
    if packed:
        body = gzip.compress(body, _COMPRESSION_LEVEL)
        headers["Content-Encoding"] = "gzip"
    return body, headers


log = logging.getLogger("mp_agent.node")

RETRY_SECONDS = 5.0


class PortOpener:
    """Opens the port once; the server closes it."""

    def __init__(self, settings: Settings, server: MetricsServer) -> None:
        self.endpoint: Endpoint | None = None
        """Where this agent listens; None until the port is open."""
        self._settings = settings
        self._server = server
        self._next_try_seconds: float | None = None

    async def open(self, now_seconds: float, *, expects_reports: bool, earlier_port: int) -> None:
        """Open the port if scrapes are enabled or reports of other nodes are expected.

        earlier_port: see `open_listener`. A port that is in use is retried later; the first
        failure is logged.
        """
        scraped = "prometheus" in self._settings.exporters
        if self.endpoint is not None or not (scraped or expects_reports):
            return
        first_try = self._next_try_seconds is None
        if self._next_try_seconds is not None and now_seconds < self._next_try_seconds:
            return
        self._next_try_seconds = now_seconds + RETRY_SECONDS
        settings = self._settings
        try:
            granted = access(settings)
            listener = open_listener(settings.bind, settings.port, earlier_port=earlier_port)
        except (SettingError, OSError) as error:
            if first_try:
                _explain(error)
            return
        port, tls = listener.getsockname()[1], granted.tls is not None
        self.endpoint = Endpoint(settings.bind, port, tls)
        await self._server.start(listener, granted, metrics=scraped)
        log.info("serving on %s", self.endpoint.shown)
        if settings.port is None and port not in usual_ports():
            log.warning(
                "the ports %d to %d are in use: scrape configurations that list only those do not "
                "find this agent at %d",
                usual_ports()[0],
                usual_ports()[-1],
                port,
            )


def _explain(error: SettingError | OSError) -> None:
    if isinstance(error, SettingError):
        log.error("no metrics are served: %s", error)
    else:
        log.error("no metrics are served until the port is free: %s", error.strerror)
