"""Messages between node agents: their format, their protocol, and the client that sends them."""

import asyncio
import os
import random
import ssl
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from mp_agent.errors import ReportError, ReportTooLarge
from mp_agent.node.transport.pace import LONGEST_SECONDS as LONGEST_PACE_SECONDS
from mp_agent.records.node_report import KnownNode, NodeReport, Receipt
from mp_agent.records.reports import REPORT_BYTES_MAX, decode_report, encode_report
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason

ROWS_PATH = "/api/v1/rows"
RETIRE_PATH = "/api/v1/retire"
"""Request to a root: another agent has become the root."""
MOVE_PATH = "/api/v1/root"
"""Request of a root: its URL has changed."""
URGENT = "urgent"
"""In the query of a push: trouble began on the node, or the push was put off before."""
PATHS = frozenset({ROWS_PATH, RETIRE_PATH, MOVE_PATH})
"""Requests to these carry the run's token."""
PACE_HEADER = "Mp-Agent-Push-Seconds"
"""Of an answer: the time until the node's next push. The answer of an older release has none, and
an older release does not look for it."""
CONTENT_TYPE = "application/vnd.mp-agent.report+zlib"
"""Not a Content-Encoding: an HTTP library would decompress that without a limit."""

BODY_BYTES_MAX = 16 * 2**20
_COMPRESSION_LEVEL = 1


def pack(report: NodeReport) -> bytes:
    """Return the body of the request that carries a report."""
    return zlib.compress(encode_report(report), _COMPRESSION_LEVEL)


def unpack(body: bytes) -> NodeReport:
    """Return the report in a request's body.

    Raises ReportError, which says what is wrong; decompression stops at `REPORT_BYTES_MAX`.
    """
    return decode_report(inflate(body, REPORT_BYTES_MAX))


def inflate(body: bytes, bytes_max: int) -> bytes:
    """Return the encoded report in a request's body.

    Raises ReportError if there is none, or one of more than `bytes_max`, where decompression stops.
    """
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise ReportError(f"not a report: {error}") from error
    if len(data) > bytes_max:
        raise ReportTooLarge(f"more than {bytes_max} bytes unpacked")
    if not decompressor.eof:
        raise ReportError("not a report: it is truncated")
    return data


_FIRST_SECONDS = 0.5
_GROWTH = 2.0
LONGEST_SECONDS = 10.0
LONGEST_AT_END_SECONDS = 2.0
"""Used at the end of a run, when a rank may be waiting."""


@dataclass(slots=True)
class Backoff:
    """Exponential backoff with jitter: pauses double, each is shortened by up to half."""

    chance: Callable[[], float] = random.random
    longest_seconds: float = LONGEST_SECONDS
    _failures: int = 0

    def next_pause_seconds(self, *, at_end: bool = False) -> float:
        """Count a failure and return the pause before the next try."""
        longest = min(self.longest_seconds, LONGEST_AT_END_SECONDS if at_end else inf)
        # Bounded: after a day without network the power would overflow.
        pause_seconds = _FIRST_SECONDS * _GROWTH ** min(self._failures, 32)
        self._failures += 1
        return min(pause_seconds, longest) * (1.0 - 0.5 * self.chance())

    def reset(self) -> None:
        """Start over after a success."""
        self._failures = 0


TIMEOUT_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_ANSWER_BYTES_MAX = 1 << 16
_REASON_CHARACTERS_MAX = 200
_PACE_SECONDS_MAX = 3600.0
"""Beyond this, what a root says cannot be meant."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Response to a request. Status 0: there was none, and `reason` says why."""

    status: int
    body: bytes = b""
    reason: str = ""
    retry_after_seconds: float = 0.0
    pace_seconds: float = 0.0
    """Time between two pushes that the root asks for; 0: none."""

    @property
    def put_off(self) -> bool:
        """Whether the other agent is well, and asks to come again later."""
        return self.status == 503 and self.retry_after_seconds > 0.0

    @property
    def ok(self) -> bool:
        """Whether the other agent accepted the request."""
        return self.status == 200


class PushClient:
    """One HTTP session for all runs of a node agent. Never raises for network errors."""

    def __init__(
        self, tls: ssl.SSLContext | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """tls: context for HTTPS; the system's trust store by default."""
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def send_rows(self, url: str, token: str, query: Mapping[str, str], body: bytes) -> Reply:
        """Send a packed report."""
        return await self._post(f"{url}{ROWS_PATH}", token, query, body, CONTENT_TYPE)

    async def send_message(
        self, url: str, path: str, token: str, query: Mapping[str, str]
    ) -> Reply:
        """Send a message without a body; its content is the query."""
        return await self._post(f"{url}{path}", token, query, b"", "text/plain")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(
        self, url: str, token: str, query: Mapping[str, str], body: bytes, content_type: str
    ) -> Reply:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
        try:
            # A redirect would disclose the token to another server.
            async with self._open().post(
                url, params=dict(query), data=body, headers=headers, allow_redirects=False
            ) as response:
                answer = await _at_most(response.content, _ANSWER_BYTES_MAX)
                reason = "" if response.status == 200 else _legible(answer)
                return Reply(
                    response.status,
                    answer,
                    reason,
                    _retry_after_seconds(response),
                    _pace_seconds(response),
                )
        except TimeoutError:
            return Reply(0, reason=f"no answer within {self._timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Reply(0, reason=_why(error))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = aiohttp.ClientTimeout(
                total=self._timeout_seconds, sock_connect=_CONNECT_SECONDS
            )
            # Ignore proxies of the environment: they may not reach the job's own network.
            connector = aiohttp.TCPConnector(
                ssl=True if self._tls is None else self._tls,
                keepalive_timeout=2 * LONGEST_PACE_SECONDS,
            )
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=limits, trust_env=False
            )
        return self._session


async def _at_most(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    """Return a chunked body, truncated to `bytes_max`."""
    answer = b""
    while piece := await content.read(bytes_max - len(answer)):
        answer += piece
    return answer


def _why(error: Exception) -> str:
    """Return the reason of an error; for a refused connection, the system's message alone."""
    refused = type(error) is aiohttp.ClientConnectorError
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if refused and number > 0 else str(error) or type(error).__name__


def _legible(answer: bytes) -> str:
    text = answer.decode("utf-8", "replace")[:_REASON_CHARACTERS_MAX]
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _retry_after_seconds(response: aiohttp.ClientResponse) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), 60.0) if text.isdecimal() else 0.0


def _pace_seconds(response: aiohttp.ClientResponse) -> float:
    try:
        pace_seconds = float(response.headers.get(PACE_HEADER, ""))
    except ValueError:
        return 0.0
    return pace_seconds if 0.0 < pace_seconds <= _PACE_SECONDS_MAX else 0.0


class ReportSource(Protocol):
    """The part of `Run` that is used here."""

    @property
    def session(self) -> str:
        """Identifies this node's current attempt; reports of other attempts are obsolete."""

    def next_report(self) -> NodeReport | None:
        """Return a report of what is new since the last call."""

    def acknowledge(self, receipt: Receipt) -> None:
        """Process the root's answer to a report."""

    def report_dropped(self, report: NodeReport, *, too_large: bool = False) -> None:
        """Have its rows reported again, fewer at a time if it was too large."""


@dataclass(frozen=True, slots=True)
class _Packet:
    report: NodeReport
    body: bytes


class PendingReport:
    """Holds one report until the root has answered it, so that a retry sends the same one.

    A report that is too large for the root, or for a proxy before it, is sent without its layer
    tables, then dropped: its steps come back in smaller ones.
    """

    def __init__(self, run: ReportSource, *, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._run = run
        self._body_bytes_max = body_bytes_max
        self._packet: _Packet | None = None
        self.reports_dropped = 0
        """Reports that were dropped, completely or except for their step rows."""

    async def next_body(self) -> bytes | None:
        """Return the body to send next; None if there is none."""
        if self._packet is not None and self._packet.report.session != self._run.session:
            self._packet = None
        while self._packet is None:
            report = self._run.next_report()
            if report is None:
                return None
            await self._pack(report)
        return self._packet.body

    def answered(self, receipt: Receipt) -> bool:
        """Release the report: the root has answered it. Return whether it has the final one."""
        packet, self._packet = self._packet, None
        self._run.acknowledge(receipt)
        return packet is not None and packet.report.final and receipt.accepted

    def refused(self) -> None:
        """Drop the report, as the root cannot read it; what it may have held is reported again."""
        packet, self._packet = self._packet, None
        if packet is not None:
            self.reports_dropped += 1
            self._run.report_dropped(packet.report)

    async def too_large(self) -> None:
        """Shrink the report, or drop it; what it may have held is reported again."""
        packet, self._packet = self._packet, None
        if packet is not None:
            await self._shrink(packet.report)

    async def _pack(self, report: NodeReport) -> None:
        # In a thread: packing a table of all layers would delay the polling of the rings.
        body = await asyncio.to_thread(pack, report)
        if len(body) > self._body_bytes_max:
            await self._shrink(report)
        else:
            self._packet = _Packet(report, body)

    async def _shrink(self, report: NodeReport) -> None:
        self.reports_dropped += 1
        if report.layers:
            await self._pack(msgspec.structs.replace(report, layers=(), layouts=()))
        else:
            self._run.report_dropped(report, too_large=True)


class RunOnNode(ReportSource, Protocol):
    """The part of `Run` that the transport uses."""

    run_dir: Path
    url: str
    """URL at which other nodes reach this agent; set by the transport."""

    @property
    def seen(self) -> bool:
        """Whether a ring of the run has been found; the rest is valid only then."""

    @property
    def end(self) -> EndReason:
        """How the local ranks ended; RUNNING while one runs."""

    @property
    def name(self) -> str:
        """Name of the run."""

    @property
    def is_root(self) -> bool:
        """Whether this node holds rank 0."""

    @property
    def identity(self) -> RankIdentity:
        """Identity of the lowest local rank."""

    @property
    def created_unix_ns(self) -> frozenset[int]:
        """When the rings of the current attempt were created, by this node's clock."""

    @property
    def nodes(self) -> tuple[KnownNode, ...]:
        """The known nodes of the run."""

    @property
    def urgent(self) -> bool:
        """Whether a report is due at once."""

    @property
    def longest_pace_seconds(self) -> float:
        """Longest time between pushes for which the root can keep the run's steps open."""

    def follow_pace(self, pace_seconds: float) -> None:
        """At the root, wait for rows of nodes that push this often."""

    def receive(self, report: NodeReport) -> Receipt:
        """Merge another node's report."""
