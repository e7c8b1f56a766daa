"""Determines the address of a run's root agent and of this node agent, and the token."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mp_agent.inputs import addresses
from mp_agent.inputs.addresses import DEFAULT_PORT, base_url
from mp_agent.node.endpoint import Endpoint
from mp_agent.ring.run_files import RootNote
from mp_agent.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RootAddress:
    """URL and token of the root agent."""

    url: str
    token: str = field(default="", repr=False)
    """Nothing can be sent while it is empty."""
    created_unix_ns: int = 0
    """When rank 0's ring was created: identifies the attempt; 0 until it is known."""


def locate(
    settings: Settings,
    note: RootNote | None,
    environ: Mapping[str, str],
    *,
    waited: bool,
) -> RootAddress | None:
    """Return the root's address; None if it is not known.

    The setting `root` takes precedence over the note from the job's store. waited: the store had
    enough time, so MASTER_ADDR with the default port is used.
    """
    token = settings.token.get_secret_value() or (note.token if note else "")
    # The nodes of a job have the same settings: the root uses TLS if this node does.
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
    """Return the base URL for the setting `root`: a URL, host:port or a host alone."""
    scheme = "https" if tls else "http"
    named = "://" in setting
    parts = urlsplit(setting if named else f"{scheme}://{setting}")
    if parts.port is None and (parts.scheme == "http" or not named):
        parts = parts._replace(netloc=f"{parts.netloc}:{DEFAULT_PORT}")
    return parts.geturl().rstrip("/")


class OwnAddress:
    """The node's own address: the setting, else the note's, else the one toward MASTER_ADDR."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._master = environ.get("MASTER_ADDR", "")
        self._toward_master: str | None = None
        self._asking: asyncio.Task[None] | None = None

    def toward_others(self, endpoint: Endpoint, note: RootNote | None) -> str:
        """Return the name or address; "" until there is one."""
        if found := advertised(self._settings, endpoint.bind) or (note.address if note else ""):
            return found
        if self._toward_master is None and self._asking is None and self._master:
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return self._toward_master or ""

    def stop(self) -> None:
        """Cancel a lookup in progress."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        # In a thread, since a resolver may be slow.
        self._toward_master = await asyncio.to_thread(addresses.address_toward, self._master)


def advertised(settings: Settings, bind: str) -> str:
    """Return the setting `advertise`, or the only address that is listened on."""
    return settings.advertise or ("" if addresses.is_any_address(bind) else bind)


_REMEDY = "set MP_AGENT_TOKEN to the same secret on all nodes"


def advice(
    note: RootNote | None,
    root: RootAddress | None,
    *,
    is_root: bool,
    has_token: bool,
    root_setting: str = "",
    has_unreported: bool = False,
) -> Iterator[str]:
    """Yield problems that prevent a node from exchanging rows with the others of its run.

    note: of the current attempt. has_token: whether this node can authenticate other nodes.
    has_unreported: whether there are ranks of which this node, the root, has heard nothing.
    """
    if note is not None and note.problem:
        yield f"the job's store did not provide the root agent's address: {note.problem}"
    if is_root and not has_token:
        yield f"the rows of other nodes are refused because there is no token: {_REMEDY}"
    elif is_root and has_unreported:
        yield "nodes of the run have not reported to this agent, which is the root; " + (
            f"they may push to {root_setting}, as MP_AGENT_ROOT says: name the node of rank 0"
            if root_setting
            else "mp_agent_missing_rank_info names their ranks"
        )
    elif not is_root and root is None:
        yield "the root agent is not known: set MP_AGENT_ROOT to its host:port"
    elif not is_root and root is not None and not root.token:
        yield f"no rows are pushed to the root agent because there is no token: {_REMEDY}"
