"""The service that pushes this agent's runs to their roots, and receives for roots here."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path

from aiohttp import web

from mp_agent.errors import SettingError
from mp_agent.node.endpoint import Endpoint
from mp_agent.node.tls import client_tls
from mp_agent.node.transport.client import PushClient
from mp_agent.node.transport.handlers import ReportHandlers
from mp_agent.node.transport.root_link import RootLink
from mp_agent.node.transport.run_protocol import RunOnNode
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")


class PushService:
    """One `RootLink` per run; one HTTP session and one set of handlers for all."""

    def __init__(
        self,
        settings: Settings,
        runs: Callable[[], Iterable[RunOnNode]],
        endpoint: Callable[[], Endpoint | None],
    ) -> None:
        """Create the service; runs: those that are watched; endpoint: where the agent listens."""
        self._settings = settings
        self._runs = runs
        self._endpoint = endpoint
        self._client = PushClient(_tls(settings))
        self._links: dict[Path, RootLink] = {}
        self._handlers = ReportHandlers(self._link_by_name)

    def start(self) -> None:
        """Do nothing: there is no run yet."""

    def tick(self, now_seconds: float) -> None:
        """Add new runs, drop those that are over, and push what is due."""
        runs = {run.run_dir: run for run in self._runs()}
        for run_dir in self._links.keys() - runs.keys():
            link = self._links.pop(run_dir)
            self._handlers.forget(link.name)
            link.cancel()
        for run in runs.values():
            self.link(run).tick(now_seconds, self._endpoint())

    async def stop(self, deadline_seconds: float) -> None:
        """Push what is left, then close."""
        await asyncio.gather(*(link.stop(deadline_seconds) for link in self._links.values()))
        await self._client.close()

    @property
    def links(self) -> Iterable[RootLink]:
        """The links of all watched runs."""
        return self._links.values()

    @property
    def expects_reports(self) -> bool:
        """Whether other nodes push to this agent, even if it is not scraped."""
        return any(link.expects_reports for link in self._links.values())

    @property
    def senders(self) -> int:
        """Number of other node agents that push to this one, over all runs."""
        return sum(link.senders for link in self._links.values())

    def link(self, run: RunOnNode) -> RootLink:
        """Return a run's link."""
        if run.run_dir not in self._links:
            self._links[run.run_dir] = RootLink(run, self._settings, self._client)
        return self._links[run.run_dir]

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for other node agents."""
        return self._handlers.routes()

    def _link_by_name(self, name: str) -> RootLink | None:
        for link in self._links.values():
            if link.run.seen and link.run.name == name:
                return link
        return None


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context for other agents; files that cannot be used are logged."""
    try:
        return client_tls(settings)
    except SettingError as error:
        log.error("other node agents cannot be reached over HTTPS: %s", error)
        return None
