"""Addresses: of servers, with their credentials and shown without, and of this machine for others.

Nothing here sends a packet, save to a resolver.
"""

import base64
import ipaddress
import re
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from mp_agent.errors import SourceError

_HIDDEN = "***"
_SCHEMES = ("http", "https")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+\S|[^/\s]*:[^/\s]*@")
"""How an address begins: with a scheme, or with `user:password@`."""
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"<>]+")
"""A scheme of any length would be looked for at every letter of a long word, up to its end."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to send a request, and what authorizes it."""

    url: str
    """Scheme, host, port and path, without a slash at the end."""
    host: str
    query: str = field(default="", repr=False)
    """Query to be sent with every request; may hold a token."""
    authorization: str = field(default="", repr=False)
    """Value of the header, by the user and password of the address; empty without them."""


def is_address(text: str) -> bool:
    """Return whether a text is an http or https address, and no path."""
    return text.lower().startswith(("http://", "https://"))


def address_of(text: str) -> Address:
    """Return an http or https address.

    User and password may be percent-encoded. Raises SourceError, which shows neither.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise SourceError("the address has no valid host and port") from None
    if parts.scheme not in _SCHEMES or not host or port == 0:
        raise SourceError("the address is no http:// or https:// with a host")
    if "@" in parts.path + parts.query + parts.fragment or not text.isprintable() or " " in text:
        # An unencoded / ? or # in a password makes a host of what is before it.
        raise SourceError("the address has characters that have to be percent-encoded")
    shown_host = f"[{host}]" if ":" in host else host
    netloc = shown_host if port is None else f"{shown_host}:{port}"
    return Address(
        url=f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}",
        host=host,
        query=parts.query,
        authorization=_basic(parts.username, parts.password),
    )


def basic_authorization(user: bytes, password: bytes) -> str:
    """Return the value of the header for a user and a password."""
    return f"Basic {base64.b64encode(user + b':' + password).decode()}"


def shown_address(text: str) -> str:
    """Return an address as messages may show it, even an invalid one.

    User, password and fragment are left out, and the values of its query are hidden. A text that
    is no address is returned as it is.
    """
    if _ADDRESS.match(text) is None:
        return text
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    # All of it may be a password, with characters that should have been encoded.
    rest = rest.rpartition("@")[2].partition("#")[0]
    path, mark, query = rest.partition("?")
    hidden = "&".join(map(_hidden, query.split("&"))) if query else ""
    return f"{scheme}{separator}{path.rstrip('/')}{mark}{hidden}"


def shown_message(text: str) -> str:
    """Return a message with the addresses in it as `shown_address` shows them."""
    return _IN_TEXT.sub(lambda found: shown_address(found[0]), text)


def is_loopback(host: str) -> bool:
    """Return whether `host` means this machine on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "localhost.localdomain")


def _basic(user: str | None, password: str | None) -> str:
    if not user and not password:
        return ""
    return basic_authorization(unquote_to_bytes(user or ""), unquote_to_bytes(password or ""))


def _hidden(parameter: str) -> str:
    name, equals, _ = parameter.partition("=")
    return f"{name}={_HIDDEN}" if equals else _HIDDEN


DEFAULT_PORT = 9464
"""Port of a node agent."""

_ANY_PORT = 9
_ANY_ADDRESSES = ("", "0.0.0.0", "::")


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the base URL of what listens at `host` and `port`."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_any_address(host: str) -> bool:
    """Return whether listening on `host` means every address of the machine."""
    return host in _ANY_ADDRESSES


def is_local(host: str) -> bool:
    """Return whether `host` is an address of this machine. May ask a resolver."""
    for family, address in _addresses(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))
                return True
            except OSError:
                continue
    return False


def address_toward(host: str) -> str:
    """Return the address from which this machine talks to `host`; "" when there is no way.

    May ask a resolver. Where `host` is this machine under a name that others know, and it resolves
    to a loopback address as /etc/hosts often has it, the name itself is returned.
    """
    for family, address in _addresses(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            own = str(probe.getsockname()[0])
            return host if is_loopback(own) else own
    return ""


def _addresses(host: str) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [(family, address) for family, _, _, _, address in found]
