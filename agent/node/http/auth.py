"""Access control of the node agent's port: TLS, client certificates, host names, basic auth."""

import base64
import hmac
import os
import ssl
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from mp_agent.errors import SettingError
from mp_agent.node.http.host_names import host_check, host_names
from mp_agent.node.tls import server_tls
from mp_agent.node.transport.wire import PATHS
from mp_agent.settings import Settings

_OPEN_PATHS = PATHS | {"/healthz"}
"""Kubelet probes carry no password; requests of other agents carry the run's token."""


@dataclass(frozen=True, slots=True)
class Access:
    """TLS and middlewares in front of the agent's routes."""

    tls: ssl.SSLContext | None = None
    middlewares: tuple[Middleware, ...] = ()
    requires_password: bool = False


def access(settings: Settings) -> Access:
    """Return the access control for the settings.

    Raises SettingError if they contradict, or if a protective setting has an unusable value.
    """
    if settings.refused_guards:
        names = ", ".join(settings.refused_guards)
        raise SettingError(f"the value that was set for {names} cannot be used")
    tls, password = server_tls(settings), basic_auth(settings)
    own_hosts = host_check(host_names(settings, os.environ), _OPEN_PATHS)
    if password is None:
        return Access(tls, (own_hosts,))
    return Access(tls, (own_hosts, password), requires_password=True)


def basic_auth(settings: Settings) -> Middleware | None:
    """Return the middleware that requires user and password; None if they are not set."""
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
