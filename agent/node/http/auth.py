"""Who may ask the agent: by token, certificate, and the host that a request names.

The names under which a node agent may be asked: a guard against DNS rebinding.
A page in a browser inside the network cannot read what the agent serves, unless it comes from the
agent's own origin. DNS rebinding makes it one: the attacker's name first resolves to his server,
then to the agent. The browser still sends that name in `Host`, so a request is refused whose host
is a name that an attacker could register. An address needs no name server, hence any is accepted.
"""

import base64
import hmac
import ipaddress
import logging
import os
import re
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from mp_agent.errors import SettingError
from mp_agent.node.endpoint import server_tls
from mp_agent.node.transport.client import PATHS
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

RESOLVER_FILE = Path("/etc/resolv.conf")
HOSTS_FILE = Path("/etc/hosts")

_MISDIRECTED = 421
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)(?:%[\w.~%-]+)?\]|(?P<name>[A-Za-z0-9._-]{1,255}))(?::\d{0,5})?"
)
_NOT_PUBLIC = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
"""Domains that the public DNS does not have: RFC 6761, 6762, 8375, ICANN's resolution of 2024; and
that of Kubernetes' services."""
_FILE_BYTES_MAX = 1 << 18
_LOGGED_MAX = 20
_SHOWN_CHARACTERS_MAX = 100


class HostNames:
    """Decides whether the host that a request names is this agent."""

    def __init__(self, own: Iterable[str], domains: Iterable[str], allowed: Iterable[str]) -> None:
        """own: names; domains: of services, with a dot first; allowed: patterns of names."""
        self._own = frozenset(map(_normal, own)) - {""}
        self._domains = (*_NOT_PUBLIC, *map(_normal, domains))
        self._allowed = tuple(map(_normal, allowed))

    def accepts(self, host: str) -> bool:
        """Return whether a `Host` header, with or without a port, may name this agent.

        Accepted are addresses; names without a dot, which the public DNS does not have; names of
        domains that it does not have; the agent's own names; and what the setting allows.
        """
        found = _HOST.fullmatch(host.strip())
        if found is None:
            return not host.strip() or "*" in self._allowed
        name = _normal(found["name"] or "")
        return (
            _is_address(found["v6"] or name)
            or "." not in name
            or name in self._own
            or name.endswith(self._domains)
            or any(fnmatchcase(name, pattern) for pattern in self._allowed)
        )


def host_names(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    resolver_file: Path = RESOLVER_FILE,
    hosts_file: Path = HOSTS_FILE,
) -> HostNames:
    """Return the names of this agent. Reads files, and asks no name server."""
    host = socket.gethostname()
    search = list(_search_domains(resolver_file))
    named = (settings.advertise, settings.bind, settings.root, environ.get("MASTER_ADDR", ""))
    own = {host, *_aliases(hosts_file, host), *map(_host_of, named)}
    own |= {f"{host.partition('.')[0]}.{domain}" for domain in search}
    services = [f".{domain}" for domain in search if domain.startswith("svc.")]
    return HostNames(own, services, settings.allowed_hosts)


def host_check(names: HostNames, open_paths: Iterable[str]) -> Middleware:
    """Return the middleware that refuses requests for other hosts.

    open_paths: paths that are not checked, because they reveal nothing or require a token.
    """
    unchecked = frozenset(open_paths)
    logged: set[str] = set()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("Host", [])
        if request.path in unchecked or not hosts:
            # Browsers always send one; HTTP/1.0 does not need it.
            return await handler(request)
        # That of an absolute request target counts too (RFC 9112, 3.2.2).
        refused = next((one for one in (*hosts, request.host) if not names.accepts(one)), None)
        if len(hosts) == 1 and refused is None:
            return await handler(request)
        shown = repr((refused or ", ".join(hosts))[:_SHOWN_CHARACTERS_MAX])
        text = f"host {shown} is no name of this agent: add it to MP_AGENT_ALLOWED_HOSTS"
        if len(hosts) > 1:
            return web.Response(status=400, text=f"more than one host: {shown}\n")
        if len(logged) < _LOGGED_MAX and shown not in logged:
            logged.add(shown)
            log.warning("a request from %s is refused: %s", request.remote, text)
        return web.Response(status=_MISDIRECTED, text=f"{text}\n")

    return check


def _normal(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _host_of(address: str) -> str:
    """Return the host of a name, `host:port` or URL; "" without one."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""


def _search_domains(resolver_file: Path) -> Iterator[str]:
    for line in _lines(resolver_file):
        words = line.split()
        if words and words[0] in ("search", "domain"):
            yield from map(_normal, words[1:])


def _aliases(hosts_file: Path, host: str) -> Iterator[str]:
    """Yield the names that /etc/hosts gives to the addresses of this host."""
    for line in _lines(hosts_file):
        names = line.partition("#")[0].split()[1:]
        if host in names:
            yield from names


def _lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_FILE_BYTES_MAX).splitlines()
    except OSError:
        return []


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
