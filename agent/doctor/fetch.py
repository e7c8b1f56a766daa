"""Requests to node agents and Prometheus, each bounded in time and size."""

import base64
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mp_agent.errors import SettingError
from mp_agent.node.tls import client_tls
from mp_agent.ring.address import is_loopback
from mp_agent.settings import Settings

TIMEOUT_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_BODY_BYTES_MAX = 1 << 26
_REFUSED_BY_PROXY = (403, 407, 502, 503, 504)
"""Statuses of a proxy that does not reach, or does not permit, a server."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Response to a request. Status 0: there was none, and `problem` says why."""

    status: int
    body: str = ""
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status == 200


def fetch_from_agent(url: str, settings: Settings) -> FetchResult:
    """GET from a node agent, with the certificates and the password of the settings."""
    request = urllib.request.Request(url)
    password = settings.basic_auth_password.get_secret_value()
    if settings.basic_auth_user and password:
        pair = f"{settings.basic_auth_user}:{password}".encode()
        request.add_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    if urlsplit(url).scheme != "https":
        return _get(request)
    try:
        tls = client_tls(settings)
    except SettingError as error:
        return FetchResult(0, problem=str(error))
    # The certificate is issued for the name by which others reach this machine.
    tls.check_hostname = not is_loopback(urlsplit(url).hostname or "")
    return _get(request, urllib.request.HTTPSHandler(context=tls))


def fetch(url: str) -> FetchResult:
    """GET from a server without authentication."""
    return _get(urllib.request.Request(url))


def proxy_problem(url: str, proxy: str) -> str:
    """Return why a proxy does not reach a server; "" when that answers, whatever it says."""
    handler = urllib.request.ProxyHandler({urlsplit(url).scheme: proxy})
    answer = _get(urllib.request.Request(url), proxies=handler)
    return answer.problem if answer.status in (0, *_REFUSED_BY_PROXY) else ""


def connection_problem(host: str, port: int) -> str:
    """Return why a TCP connection fails; "" when one is established."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would disclose the password to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _get(
    request: urllib.request.Request,
    *handlers: urllib.request.BaseHandler,
    proxies: urllib.request.ProxyHandler | None = None,
) -> FetchResult:
    # Ignore proxies of the environment: they may not reach the job's own network.
    proxies = proxies or urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(proxies, _NoRedirect(), *handlers)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            body = response.read(_BODY_BYTES_MAX).decode("utf-8", "replace")
            return FetchResult(response.status, body)
    except urllib.error.HTTPError as error:
        with error:
            return FetchResult(error.code, problem=f"status {error.code} {error.reason}")
    except urllib.error.URLError as error:
        return FetchResult(0, problem=_reason(error.reason))
    except Exception as error:
        # http.client raises more than OSError when the response is not HTTP.
        return FetchResult(0, problem=_reason(error))


def _reason(error: object) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
