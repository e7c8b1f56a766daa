"""HTTP client for other node agents; each request is bounded in time."""

import asyncio
import os
import random
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import aiohttp

from mp_agent.node.transport.wire import CONTENT_TYPE, ROWS_PATH

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


@dataclass(frozen=True, slots=True)
class Reply:
    """Response to a request. Status 0: there was none, and `reason` says why."""

    status: int
    body: bytes = b""
    reason: str = ""
    retry_after_seconds: float = 0.0

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
                return Reply(response.status, answer, reason, _retry_after_seconds(response))
        except asyncio.TimeoutError:
            return Reply(0, reason=f"no answer within {self._timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Reply(0, reason=_why(error))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = aiohttp.ClientTimeout(
                total=self._timeout_seconds, sock_connect=_CONNECT_SECONDS
            )
            # Ignore proxies of the environment: they may not reach the job's own network.
            connector = aiohttp.TCPConnector(ssl=True if self._tls is None else self._tls)
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
    return min(float(text), 60.0) if text.isdigit() else 0.0
