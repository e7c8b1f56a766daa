"""Answers other node agents of a run: reports of rows, and changes of the root."""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl

from aiohttp import web

from mp_agent.errors import FailureLog, ReportError, ReportTooLarge, SettingError
from mp_agent.node.endpoint import Endpoint, client_tls
from mp_agent.node.transport.client import (
    BODY_BYTES_MAX,
    MOVE_PATH,
    PACE_HEADER,
    RETIRE_PATH,
    ROWS_PATH,
    URGENT,
    PushClient,
    RunOnNode,
    inflate,
    unpack,
)
from mp_agent.node.transport.pace import Load, PushPace, RateLimit
from mp_agent.node.transport.root_link import RootLink
from mp_agent.records.node_report import NodeReport
from mp_agent.records.reports import decode_report, encode_receipt
from mp_agent.ring.run_files import is_base_url
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

_BODIES_AT_ONCE = 32
_BODY_SECONDS = 20.0
_AT_ONCE_BYTES = 1 << 18
"""Larger reports, packed or not, are unpacked in a thread: they would delay the polling."""
_BEARER = "Bearer "


class _Refusal(Exception):
    def __init__(self, status: int, reason: str, *, retry_after_seconds: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class ReportHandlers:
    """Checks each request in this order: sender, root and attempt, size and rate."""

    def __init__(
        self, link: Callable[[str], RootLink | None], pace: PushPace | None = None
    ) -> None:
        """link: returns a run's link by the run's name.

        pace: that of the nodes; None: each has its own.
        """
        self.requests = 0
        """Pushes that were read, and answered."""
        self._link = link
        self._pace = pace
        self._rate = RateLimit()
        self._room = asyncio.Semaphore(_BODIES_AT_ONCE)
        self._failures = FailureLog()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for the HTTP server."""
        return [
            web.post(ROWS_PATH, self._rows),
            web.post(RETIRE_PATH, self._retire),
            web.post(MOVE_PATH, self._move),
        ]

    def forget(self, run: str) -> None:
        """Drop the rate limits of a run that is over."""
        self._rate.forget(run)

    def answer_at_once(self, data: bytes) -> bytes | None:
        """Return the response to a push that has arrived as a whole; see `AnswerAtOnce`.

        Most of what a push costs is what the HTTP library does around it. What an agent would not
        send, or has no business to, is left to that.
        """
        if not data.startswith(_PUSH):
            return None
        end = data.find(_HEAD_END, 0, _HEAD_BYTES_MAX)
        if end < 0:
            return b"" if len(data) < _HEAD_BYTES_MAX and b"\n\n" not in data else None
        head = _pushed(data[:end])
        if head is None or head.length > _AT_ONCE_BYTES:
            return None
        try:
            link = _authenticated(self._link(head.query.get("run", "")), head.authorization)
        except _Refusal:
            return None
        body = data[end + len(_HEAD_END) :]
        if len(body) != head.length:
            return b"" if len(body) < head.length else None
        try:
            report = inflate(body, _AT_ONCE_BYTES)
        except ReportError:
            return None
        try:
            self._admit(link, head.query, head.length)
            with self._explained(link):
                answer = _receipt(link, head.query, decode_report(report))
        except _Refusal as refusal:
            return self._refused(link, refusal, len(body)).encoded()
        return self._accepted(link, answer, len(body)).encoded()

    async def _rows(self, request: web.Request) -> web.Response:
        link = self._link(request.query.get("run", ""))
        size = 0
        try:
            link = _authenticated(link, request.headers.get("Authorization", ""))
            self._admit(link, request.query, request.content_length or 0)
            async with self._room:
                body = await _body(request)
                size = len(body)
                with self._explained(link):
                    report = await asyncio.to_thread(unpack, body)
                    answer = _receipt(link, request.query, report)
        except _Refusal as refusal:
            return self._refused(link, refusal, size).response()
        except TimeoutError:
            late = _Refusal(408, f"the body took more than {_BODY_SECONDS:g} s")
            return _refusal(late).response()
        except ConnectionError:
            return _refusal(_Refusal(400, "the sender has gone")).response()
        return self._accepted(link, answer, size).response()

    def _accepted(self, link: RootLink, receipt: bytes, size: int) -> "_Answer":
        link.count_request(size, refused=False)
        self.requests += 1
        pace = {} if self._pace is None else {PACE_HEADER: f"{self._pace.asked_seconds:.3f}"}
        return _Answer(200, receipt, {"Content-Type": "application/octet-stream", **pace})

    def _refused(self, link: RootLink | None, refusal: _Refusal, size: int) -> "_Answer":
        if link is not None and refusal.status != 503:
            link.count_request(size, refused=True)
        return _refusal(refusal)

    async def _retire(self, request: web.Request) -> web.Response:
        try:
            link = self._asked(request)
            if not link.retire(_integer(request.query, "attempt")):
                raise _Refusal(409, "this agent is in another attempt")
        except _Refusal as refusal:
            return _refusal(refusal).response()
        return web.Response(text="ok\n")

    async def _move(self, request: web.Request) -> web.Response:
        try:
            link = self._asked(request)
            url = request.query.get("url", "")
            if not is_base_url(url):
                raise _Refusal(400, "url is not that of a node agent")
            if not link.follow_move(_integer(request.query, "attempt"), url):
                raise _Refusal(409, "this agent is the root, or in another attempt")
        except _Refusal as refusal:
            return _refusal(refusal).response()
        return web.Response(text="ok\n")

    def _asked(self, request: web.Request) -> RootLink:
        link = self._link(request.query.get("run", ""))
        return _authenticated(link, request.headers.get("Authorization", ""))

    def _admit(self, link: RootLink, query: Mapping[str, str], size: int) -> None:
        """Refuse unless this agent is the attempt's root and the sender within its rate."""
        if not link.collects:
            raise _Refusal(409, "this agent is not the root of the run")
        attempt_unix_ns = _integer(query, "attempt")
        if attempt_unix_ns and link.attempt_unix_ns not in (0, attempt_unix_ns):
            raise _Refusal(409, "this agent is the root of another attempt")
        if size > BODY_BYTES_MAX:
            raise _Refusal(413, f"more than {BODY_BYTES_MAX} bytes")
        sender = (link.run.name, _integer(query, "node"))
        if sender[1] >= link.run.identity.world_size:
            raise _Refusal(400, f"node {sender[1]} is none of the run")
        if not self._rate.admits(sender, time.monotonic()):
            raise _Refusal(429, "too many requests of this node", retry_after_seconds=1)
        if self._pace is None:
            return
        urgent = URGENT in query
        if put_off := self._pace.put_off_seconds(sender, time.monotonic(), urgent=urgent):
            raise _Refusal(503, "many nodes push at once", retry_after_seconds=put_off)

    @contextmanager
    def _explained(self, link: RootLink) -> Iterator[None]:
        """Refuse a report that cannot be read, with the reason."""
        try:
            yield
        except ReportTooLarge as error:
            raise _Refusal(413, str(error)) from error
        except ReportError as error:
            raise _Refusal(400, str(error)) from error
        except Exception as error:
            kind = type(error).__name__
            self._failures.note("run %s: a report cannot be processed", link.run.name, kind=kind)
            raise _Refusal(500, kind) from error


_PUSH = f"POST {ROWS_PATH}?".encode()
_VERSION = b" HTTP/1.1"
_HEAD_END = b"\r\n\r\n"
_HEAD_BYTES_MAX = 8192
_PRINTABLE = bytes(range(0x20, 0x7F))
_HOST = {b"host: "}
_HEADERS = _HOST.union(
    (b"accept: ", b"accept-encoding: ", b"authorization: ", b"content-length: "),
    (b"content-type: ", b"user-agent: "),
)
"""Those of a push, of which none changes how it is to be read."""


@dataclass(frozen=True, slots=True)
class _Head:
    query: Mapping[str, str]
    authorization: str
    length: int


def _pushed(head: bytes) -> _Head | None:
    """Return what the head of a push says; None if the HTTP library might read it otherwise."""
    line, *lines = head.split(b"\r\n")
    if not line.endswith(_VERSION) or line.count(b" ") != 2 or line.count(b"#"):
        return None
    if head.translate(None, _PRINTABLE) != b"\r\n" * len(lines):
        return None
    parted = [field.partition(b": ") for field in lines]
    fields = {name.lower() + colon: value for name, colon, value in parted}
    length = fields.get(b"content-length: ", b"")
    if len(fields) != len(lines) or not _HOST <= fields.keys() <= _HEADERS or not length.isdigit():
        return None
    try:
        size = int(length)
        target = line[len(_PUSH) : -len(_VERSION)].decode()
        pairs = parse_qsl(target, keep_blank_values=True, strict_parsing=True)
        authorization = fields.get(b"authorization: ", b"").decode()
    except ValueError:
        return None
    query = dict(pairs)
    return _Head(query, authorization, size) if len(query) == len(pairs) else None


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]

    def response(self) -> web.Response:
        """Return it for the HTTP library."""
        return web.Response(status=self.status, body=self.body, headers=self.headers)

    def encoded(self) -> bytes:
        """Return it as it is sent."""
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append(f"Content-Length: {len(self.body)}\r\n\r\n")
        return "\r\n".join(lines).encode() + self.body


def _authenticated(link: RootLink | None, authorization: str) -> RootLink:
    """Return the link of the run that the sender is authorised for; else raise a refusal.

    Without a token a client learns nothing, not even which runs exist.
    """
    token = authorization.removeprefix(_BEARER) if authorization.startswith(_BEARER) else ""
    if link is None or not token or not link.accepts(token):
        raise _Refusal(401, "the token is not that of a run that this agent watches")
    return link


async def _body(request: web.Request) -> bytes:
    """Return a request's body; most arrive together with the head."""
    if request.content.is_eof() and request.content.total_bytes <= BODY_BYTES_MAX:
        return request.content.read_nowait()
    return await asyncio.wait_for(_read(request), _BODY_SECONDS)


async def _read(request: web.Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > BODY_BYTES_MAX:
            raise _Refusal(413, f"more than {BODY_BYTES_MAX} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _receipt(link: RootLink, query: Mapping[str, str], report: NodeReport) -> bytes:
    """Have the run take in a report of the node that pushed it; return the answer."""
    node = _integer(query, "node")
    if report.node_rank != node:
        raise ReportError(f"a report of node {report.node_rank}, pushed as one of node {node}")
    return encode_receipt(link.run.receive(report))


def _integer(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise _Refusal(400, f"{name} has value {text[:40]!r}, which is not a number")
    return int(text)


def _refusal(refusal: _Refusal) -> _Answer:
    headers = {"Content-Type": "text/plain; charset=utf-8"}
    if refusal.retry_after_seconds:
        headers["Retry-After"] = f"{refusal.retry_after_seconds}"
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _Answer(refusal.status, f"{refusal}\n".encode(), headers)


class PushService:
    """One `RootLink` per run; one HTTP session and one set of handlers for all."""

    def __init__(
        self,
        settings: Settings,
        runs: Callable[[], Iterable[RunOnNode]],
        endpoint: Callable[[], Endpoint | None],
    ) -> None:
        """Create the service; runs: those that are watched; endpoint: where the agent listens."""
        self._settings = settings
        self._runs = runs
        self._endpoint = endpoint
        self._client = PushClient(_tls(settings))
        self._links: dict[Path, RootLink] = {}
        self._pace = PushPace(settings.push_interval_seconds, settings.root_core_share)
        self._handlers = ReportHandlers(self._link_by_name, self._pace)
        self.answer_at_once = self._handlers.answer_at_once
        self.own_seconds = 0.0
        """Processor time that this agent has spent on anything but requests."""

    def start(self) -> None:
        """Do nothing: there is no run yet."""

    def tick(self, now_seconds: float) -> None:
        """Add new runs, drop those that are over, and push what is due."""
        runs = {run.run_dir: run for run in self._runs()}
        for run_dir in self._links.keys() - runs.keys():
            link = self._links.pop(run_dir)
            self._handlers.forget(link.name)
            link.cancel()
        self._set_pace(now_seconds)
        for run in runs.values():
            self.link(run).tick(now_seconds, self._endpoint())

    def _set_pace(self, now_seconds: float) -> None:
        roots = [link for link in self._links.values() if link.expects_reports]
        if not roots:
            return
        load = Load(time.process_time(), self.own_seconds, self._handlers.requests)
        limit_seconds = min(link.run.longest_pace_seconds for link in roots)
        self._pace.tick(now_seconds, load, self.senders, limit_seconds=limit_seconds)
        for link in roots:
            link.follow_pace(self._pace.allowed_seconds(now_seconds))

    async def stop(self, deadline_seconds: float) -> None:
        """Push what is left, then close."""
        await asyncio.gather(*(link.stop(deadline_seconds) for link in self._links.values()))
        await self._client.close()

    @property
    def links(self) -> Iterable[RootLink]:
        """The links of all watched runs."""
        return self._links.values()

    @property
    def expects_reports(self) -> bool:
        """Whether other nodes push to this agent, even if it is not scraped."""
        return any(link.expects_reports for link in self._links.values())

    @property
    def senders(self) -> int:
        """Number of other node agents that push to this one, over all runs."""
        return sum(link.senders for link in self._links.values())

    def link(self, run: RunOnNode) -> RootLink:
        """Return a run's link."""
        if run.run_dir not in self._links:
            self._links[run.run_dir] = RootLink(run, self._settings, self._client)
        return self._links[run.run_dir]

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for other node agents."""
        return self._handlers.routes()

    def _link_by_name(self, name: str) -> RootLink | None:
        for link in self._links.values():
            if link.run.seen and link.run.name == name:
                return link
        return None


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context for other agents; files that cannot be used are logged."""
    try:
        return client_tls(settings)
    except SettingError as error:
        log.error("other node agents cannot be reached over HTTPS: %s", error)
        return None
