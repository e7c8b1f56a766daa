"""Under which address the agents of other nodes, and Prometheus, reach this one."""

import asyncio
from collections.abc import Mapping

from mp_agent.node.listen import Endpoint
from mp_agent.ring import address
from mp_agent.ring.root_note import RootNote
from mp_agent.settings import Settings


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
