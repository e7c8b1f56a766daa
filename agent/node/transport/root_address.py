"""Where the root agent of a run is, and with which secret it is addressed."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mp_agent.node.endpoint import Endpoint
from mp_agent.ring import address
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


class OwnAddress:
    """What was set, else what the rank could tell, else the address toward MASTER_ADDR."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._master = environ.get("MASTER_ADDR", "")
        self._toward_master: str | None = None
        self._asking: asyncio.Task[None] | None = None

    def toward_others(self, endpoint: Endpoint, note: RootNote | None) -> str:
        """Return the name or address; "" as long as there is none."""
        if found := advertised(self._settings, endpoint.bind) or (note.address if note else ""):
            return found
        if self._toward_master is None and self._asking is None and self._master:
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return self._toward_master or ""

    def stop(self) -> None:
        """Do not ask any more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        # Aside, since a resolver may take its time.
        self._toward_master = await asyncio.to_thread(address.address_toward, self._master)


def advertised(settings: Settings, bind: str) -> str:
    """Return the address that was set for this node, or the only one that is listened on."""
    return settings.advertise or ("" if address.is_any_address(bind) else bind)


_REMEDY = "set MP_AGENT_TOKEN to the same secret on all nodes"


def advice(
    note: RootNote | None, root: RootAddress | None, *, is_root: bool, has_token: bool
) -> Iterator[str]:
    """Yield what keeps a node apart from the others of its run.

    note: of the present attempt. has_token: whether this node can tell who belongs to the run.
    """
    if note is not None and note.problem:
        yield f"the job's store did not tell where the root agent is: {note.problem}"
    if is_root and not has_token:
        yield f"the rows of other nodes are refused, for want of a token: {_REMEDY}"
    elif not is_root and root is None:
        yield "the root agent is not known: set MP_AGENT_ROOT to its host:port"
    elif not is_root and root is not None and not root.token:
        yield f"no rows are pushed to the root agent, for want of a token: {_REMEDY}"
