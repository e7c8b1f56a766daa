"""HTTP requests and queries of a Prometheus, bounded in time and in the size of the answer."""

import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from mp_agent.errors import AnswerTooLarge, SourceError
from mp_agent.inputs.addresses import Address, address_of, is_loopback, shown_address, shown_message

BODY_BYTES_MAX = 64 << 20
_PIECE_BYTES = 1 << 16
_PROBLEM_BYTES_MAX = 4096
_PROBLEM_CHARACTERS_MAX = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """Response to a request. Status 0: there was none, and `problem` says why."""

    status: int
    body: bytes = b""
    problem: str = ""
    too_large: bool = False

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status == 200

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")


def send(
    address: Address,
    path: str = "",
    *,
    query: str = "",
    form: bytes | None = None,
    seconds: float,
    authorization: str = "",
    tls: ssl.SSLContext | None = None,
    proxies: bool = False,
    proxy: str = "",
) -> Answer:
    """Return the answer of a server to GET, or to POST of a form.

    Redirects are not followed: they would disclose the credentials to another server. seconds: for
    all of it, name resolution included. authorization: instead of that of the address. proxies:
    whether to use those of the environment, except to this machine. proxy: the one to go through
    instead. Never raises for what network and server do.
    """
    parameters = "&".join(filter(None, (address.query, query)))
    url = f"{address.url}{path}" + (f"?{parameters}" if parameters else "")
    headers = {"Accept": "*/*"}
    if authorization := authorization or address.authorization:
        headers["Authorization"] = authorization
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    deadline_seconds = time.monotonic() + seconds

    def ask() -> None:
        try:
            request = urllib.request.Request(url, data=form, headers=headers)
            use_environment = proxies and not is_loopback(address.host)
            chosen = urllib.request.getproxies() if use_environment else {}
            if proxy:
                chosen = {request.type: proxy}
            opener = _opener(tls, chosen)
            answers.put(_answer(opener, request, deadline_seconds))
        except Exception as error:
            # http.client raises more than OSError when the response is not HTTP.
            answers.put(Answer(0, problem=_reason(error)))

    # In a thread: a server that sends a byte now and then never exceeds a socket's time-out.
    threading.Thread(target=ask, name="mp_agent.http", daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return Answer(0, problem=f"no answer within {seconds:g} s")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(tls: ssl.SSLContext | None, proxies: dict[str, str]) -> urllib.request.OpenerDirector:
    handlers: list[urllib.request.BaseHandler] = [
        _NoRedirect(),
        urllib.request.ProxyHandler(proxies),
    ]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    return urllib.request.build_opener(*handlers)


def _answer(
    opener: urllib.request.OpenerDirector, request: urllib.request.Request, deadline_seconds: float
) -> Answer:
    left_seconds = max(deadline_seconds - time.monotonic(), 0.001)
    try:
        with opener.open(request, timeout=left_seconds) as response:
            return _read(response, deadline_seconds)
    except urllib.error.HTTPError as error:
        with error:
            if 300 <= error.code < 400:
                place = shown_address(error.headers.get("Location", ""))
                return Answer(error.code, problem=f"status {error.code}: it redirects to {place}")
            body = error.read(_PROBLEM_BYTES_MAX)
            problem = f"status {error.code} {error.reason}"[:_PROBLEM_CHARACTERS_MAX]
            return Answer(error.code, body, problem)


def _read(response: HTTPResponse, deadline_seconds: float) -> Answer:
    pieces, size = [], 0
    while piece := response.read1(_PIECE_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > BODY_BYTES_MAX:
            problem = f"the answer holds more than {BODY_BYTES_MAX >> 20} MiB"
            return Answer(0, problem=problem, too_large=True)
        if time.monotonic() > deadline_seconds:
            return Answer(0, problem="no complete answer in time")
    return Answer(response.status, b"".join(pieces))


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, HTTPException) and not isinstance(error, OSError):
        return f"it does not speak HTTP: {shown_message(repr(error))}"[:_PROBLEM_CHARACTERS_MAX]
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shown_message(str(text))[:_PROBLEM_CHARACTERS_MAX]


TIMEOUT_SECONDS = 60.0
_EXCERPT_CHARACTERS = 60

_Data = TypeVar("_Data")


class SeriesData(Struct):
    """One series of a matrix: its labels, and (Unix seconds, value) pairs."""

    metric: dict[str, str]
    values: list[tuple[float, str]] = []


class Matrix(Struct, rename="camel", tag_field="resultType", tag="matrix"):
    """Data of `query_range`."""

    result: list[SeriesData]


class SampleData(Struct):
    """One sample of a vector."""

    metric: dict[str, str]
    value: tuple[float, str]


class Vector(Struct, rename="camel", tag_field="resultType", tag="vector"):
    """Data of `query`."""

    result: list[SampleData]


class _Envelope(Struct):
    status: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


def ask(
    address: str,
    path: str,
    parameters: Mapping[str, object],
    data: type[_Data],
    *,
    seconds: float = TIMEOUT_SECONDS,
) -> _Data:
    """Return `data` of the answer at `/api/v1/<path>`, as the type that is asked for.

    User, password and query of the address are sent along. Raises SourceError, without them, which
    says where the answer is not of that type; AnswerTooLarge for one beyond the limit.
    """
    text = urlencode(parameters)
    # Queries can be longer than what proxies take in a URL.
    posted = path == "query_range"
    answer = send(
        address_of(address),
        f"/api/v1/{path}",
        query="" if posted else text,
        form=text.encode() if posted else None,
        seconds=seconds,
        proxies=True,
    )
    if answer.too_large:
        raise AnswerTooLarge(answer.problem)
    if not answer.ok:
        raise SourceError(_problem(answer))
    try:
        envelope = msgspec.json.decode(answer.body, type=_Envelope)
        if envelope.status != "success":
            raise SourceError(f"the answer is {envelope.status!r}: {envelope.error}")
        return msgspec.json.decode(envelope.data, type=data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        begins = answer.body[:_EXCERPT_CHARACTERS].decode("utf-8", "replace")
        raise SourceError(f"the answer is not Prometheus': {error}; it begins {begins!r}") from None


def _problem(answer: Answer) -> str:
    if not answer.status:
        return f"cannot be asked: {answer.problem}"
    if not answer.body:
        return answer.problem
    try:
        return f"{answer.problem}: {msgspec.json.decode(answer.body, type=_Envelope).error}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return answer.problem
