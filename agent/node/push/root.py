"""Where the root agent of a run is, and with which secret it is addressed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mp_agent.ring.address import DEFAULT_PORT, base_url
from mp_agent.ring.root_note import RootNote
from mp_agent.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RootAddress:
    """Where rows are to go."""

    url: str
    token: str = field(default="", repr=False)
    """Empty: nothing can be sent."""
    created_unix_ns: int = 0
    """When rank 0's ring was made: names the attempt; 0 while it is not known."""


def locate(
    settings: Settings,
    note: RootNote | None,
    environ: Mapping[str, str],
    *,
    waited: bool,
) -> RootAddress | None:
    """Return the root's address as far as it can be told.

    The setting `root` wins, then what the job's store told; waited: nothing more is to be expected
    of the store, so that MASTER_ADDR with the default port has to do.
    """
    token = settings.token.get_secret_value() or (note.token if note else "")
    # The nodes of a job have the same settings: what this one speaks, the root speaks.
    tls = settings.tls_certificate is not None
    if settings.root:
        return RootAddress(url=root_url(settings.root, tls=tls), token=token)
    if note is not None and note.url:
        if note.problem:
            return RootAddress(url=note.url, token=token)
        return RootAddress(
            url=note.url,
            token=note.token or token,
            created_unix_ns=note.created_unix_ns,
        )
    if waited and (master := environ.get("MASTER_ADDR")):
        return RootAddress(url=base_url(master, DEFAULT_PORT, tls=tls), token=token)
    return None


def root_url(setting: str, *, tls: bool = False) -> str:
    """Return the base URL that the setting `root` means: a URL, host:port or a host alone."""
    scheme = "https" if tls else "http"
    named = "://" in setting
    parts = urlsplit(setting if named else f"{scheme}://{setting}")
    if parts.port is None and (parts.scheme == "http" or not named):
        parts = parts._replace(netloc=f"{parts.netloc}:{DEFAULT_PORT}")
    return parts.geturl().rstrip("/")
