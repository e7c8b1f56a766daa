"""What of a tracker's answer is shown: a name and an address, which are untrusted text."""

import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from mp_agent.exporters.trackers.client import TrackerClient
from mp_agent.records.views import TrackerLink

NAME_MAX = 200
URL_MAX = 1000
"""Characters; VictoriaMetrics drops label values of more than 4096 bytes."""

_OF_URLS = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&()*+,;=%-]*")
"""RFC 3986 without the quote: nothing that ends a string, an attribute or a link of Slack's."""


def link_of(tracker: str, client: TrackerClient) -> TrackerLink:
    """Return what may be shown of a client's run; an empty address where it has none to show."""
    return TrackerLink(tracker=tracker, name=shown_name(client.name), url=shown_url(client.url))


def shown_name(name: str) -> str:
    """Return a name without what cannot be printed, at most `NAME_MAX` characters."""
    return "".join(filter(str.isprintable, name))[:NAME_MAX]


def shown_url(url: str) -> str:
    """Return an http, https or file address without user, password and query.

    Any of these may hold a key. Empty where it is another kind of address, longer than `URL_MAX`,
    or has characters that do not belong into one.
    """
    if len(url) > URL_MAX or not _OF_URLS.fullmatch(url):
        return ""
    try:
        parts = urlsplit(url)
        return _without_secrets(parts)
    except ValueError:  # an address of IPv6 without its end, a port that is no number
        return ""


def file_url(path: str | Path) -> str:
    """Return the address of a file or directory of this machine."""
    return Path(path).absolute().as_uri()


def _without_secrets(parts: SplitResult) -> str:
    if parts.scheme == "file":
        local = parts.netloc in ("", "localhost") and parts.path.startswith("/")
        return f"file://{parts.path}" if local else ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = "" if parts.port is None else f":{parts.port}"
    return SplitResult(parts.scheme, host + port, parts.path, "", parts.fragment).geturl()
