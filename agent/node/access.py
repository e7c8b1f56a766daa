"""Who may talk to the node agent: TLS, client certificates and basic auth."""

import base64
import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from mp_agent.errors import SettingError
from mp_agent.node.push.wire import PATHS
from mp_agent.settings import Settings

_OPEN_PATHS = PATHS | {"/healthz"}
"""Probes of a kubelet carry no password; what other agents send carries the run's token."""


@dataclass(frozen=True, slots=True)
class Access:
    """What stands between the agent's port and its paths."""

    tls: ssl.SSLContext | None = None
    middlewares: tuple[Middleware, ...] = ()


def access(settings: Settings) -> Access:
    """Return the access that the settings ask for.

    Raises SettingError when they contradict, or when a guard was set to what cannot be used.
    """
    if settings.refused_guards:
        names = ", ".join(settings.refused_guards)
        raise SettingError(f"the value that was set for {names} cannot be used")
    check = basic_auth(settings)
    return Access(server_tls(settings), () if check is None else (check,))


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS of the agent's port, None where it speaks plain HTTP.

    With `tls_client_ca` a client needs a certificate of that authority. Raises SettingError,
    naming the setting and the file, for files that cannot be used.
    """
    if settings.tls_certificate is None and settings.tls_key is None:
        if settings.tls_client_ca is not None:
            raise SettingError("tls_client_ca is set, but tls_certificate is not")
        return None
    if settings.tls_certificate is None or settings.tls_key is None:
        missing = "tls_certificate" if settings.tls_certificate is None else "tls_key"
        raise SettingError(f"{missing} is not set: TLS needs both a certificate and its key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _use_certificate(context, settings.tls_certificate, settings.tls_key)
    if settings.tls_client_ca is not None:
        _trust(context, "tls_client_ca", settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(settings: Settings) -> ssl.SSLContext:
    """Return the TLS with which this agent calls others of its run.

    It trusts `tls_ca`, else the system's authorities, and shows the agent's own certificate.
    """
    context = ssl.create_default_context()
    if settings.tls_ca is not None:
        _trust(context, "tls_ca", settings.tls_ca)
    if settings.tls_certificate is not None and settings.tls_key is not None:
        _use_certificate(context, settings.tls_certificate, settings.tls_key)
    return context


def basic_auth(settings: Settings) -> Middleware | None:
    """Return what asks for user and password, None where nobody has to give any."""
    password = settings.basic_auth_password.get_secret_value()
    if not settings.basic_auth_user and not password:
        return None
    if not settings.basic_auth_user or not password:
        missing = "basic_auth_password" if settings.basic_auth_user else "basic_auth_user"
        raise SettingError(f"{missing} is not set: basic auth needs both a user and a password")
    credentials = f"{settings.basic_auth_user}:{password}".encode()
    expected = b"Basic " + base64.b64encode(credentials)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path in _OPEN_PATHS or hmac.compare_digest(given, expected):
            return await handler(request)
        challenge = {"WWW-Authenticate": 'Basic realm="mp_agent", charset="UTF-8"'}
        raise web.HTTPUnauthorized(headers=challenge)

    return check


def _use_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        # A key that asks for a password must not make the agent wait at a terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise SettingError(
            f"tls_certificate {certificate} and tls_key {key} cannot be used: {_reason(error)}"
        ) from error


def _trust(context: ssl.SSLContext, setting: str, authority: Path) -> None:
    try:
        context.load_verify_locations(cafile=authority)
    except OSError as error:
        raise SettingError(f"{setting} {authority} cannot be used: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
