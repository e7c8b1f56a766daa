"""The port of a node agent: choice, listening socket, URL and TLS."""

import errno
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from mp_agent.errors import SettingError
from mp_agent.inputs.addresses import DEFAULT_PORT, base_url, is_any_address, is_local
from mp_agent.settings import Settings

PORTS_TRIED = 16

_IPV4_LOOPBACK, _IPV6_LOOPBACK = "127.0.0.1", "::1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a node agent listens, and the URL under which this machine reaches it."""

    bind: str
    port: int
    tls: bool = False

    @property
    def shown(self) -> str:
        """The address for log lines."""
        if not is_any_address(self.bind):
            return self.url
        return f"all addresses, port {self.port}, here {self.url}"

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        host = self.bind
        if is_any_address(host):
            has_ipv4 = host != "::" and is_local(_IPV4_LOOPBACK)
            host = _IPV4_LOOPBACK if has_ipv4 else _IPV6_LOOPBACK
        return base_url(host, self.port, tls=self.tls)


def usual_ports() -> range:
    """Return the ports from which an agent chooses if none is set."""
    return range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED)


def open_listener(bind: str, port: int | None, *, earlier_port: int = 0) -> socket.socket:
    """Return a listening socket on `port`; for None, on the first free port from 9464 on.

    If the 16 ports that are usually scraped are all in use, any free port. earlier_port: that of
    the previous node agent; preferred if `port` is None, so that its clients find the successor.
    Raises OSError, naming address and port, if no port can be opened.
    """
    ports = (*usual_ports(), 0) if port is None else (port,)
    earlier = (earlier_port,) if earlier_port and not port else ()
    for candidate in (*earlier, *ports):
        try:
            return _listen(bind, candidate)
        except OSError as error:
            refusal = error
    tried = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} and later"
    raise OSError(refusal.errno, f"{bind or 'all addresses'}, port {tried}: {refusal.strerror}")


def _listen(bind: str, port: int) -> socket.socket:
    """Return a listening socket; for "", on all addresses of both families if available."""
    if not bind and socket.has_dualstack_ipv6():
        try:
            return socket.create_server((bind, port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    return socket.create_server((bind, port), family=family)


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the agent's port; None for plain HTTP.

    With `tls_client_ca` clients need a certificate of that authority. Raises SettingError, naming
    the setting and the file, for files that cannot be used.
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
    """Return the TLS context for requests to other node agents.

    It trusts `tls_ca`, else the system's authorities, and presents the agent's own certificate.
    """
    context = ssl.create_default_context()
    if settings.tls_ca is not None:
        _trust(context, "tls_ca", settings.tls_ca)
    if settings.tls_certificate is not None and settings.tls_key is not None:
        _use_certificate(context, settings.tls_certificate, settings.tls_key)
    return context


def _use_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        # An encrypted key must not make the agent prompt at a terminal.
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
