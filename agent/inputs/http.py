"""HTTP requests, each bounded in time and in the size of its answer, whatever the server does."""

import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from mp_agent.inputs.addresses import Address, is_loopback, shown_address, shown_message

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
