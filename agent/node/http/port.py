"""Opens the agent's port once it is needed, and retries while it is in use."""

import logging

from mp_agent.errors import SettingError
from mp_agent.node.endpoint import Endpoint, open_listener, usual_ports
from mp_agent.node.http.auth import access
from mp_agent.node.http.server import MetricsServer
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

RETRY_SECONDS = 5.0


class PortOpener:
    """Opens the port once; the server closes it."""

    def __init__(self, settings: Settings, server: MetricsServer) -> None:
        self.endpoint: Endpoint | None = None
        """Where this agent listens; None until the port is open."""
        self._settings = settings
        self._server = server
        self._next_try_seconds: float | None = None

    async def open(self, now_seconds: float, *, expects_reports: bool, earlier_port: int) -> None:
        """Open the port if scrapes are enabled or reports of other nodes are expected.

        earlier_port: see `open_listener`. A port that is in use is retried later; the first
        failure is logged.
        """
        scraped = "prometheus" in self._settings.exporters
        if self.endpoint is not None or not (scraped or expects_reports):
            return
        first_try = self._next_try_seconds is None
        if self._next_try_seconds is not None and now_seconds < self._next_try_seconds:
            return
        self._next_try_seconds = now_seconds + RETRY_SECONDS
        settings = self._settings
        try:
            granted = access(settings)
            listener = open_listener(settings.bind, settings.port, earlier_port=earlier_port)
        except (SettingError, OSError) as error:
            if first_try:
                _explain(error)
            return
        port, tls = listener.getsockname()[1], granted.tls is not None
        self.endpoint = Endpoint(settings.bind, port, tls)
        await self._server.start(listener, granted, metrics=scraped)
        log.info("serving on %s", self.endpoint.shown)
        if settings.port is None and port not in usual_ports():
            log.warning(
                "the ports %d to %d are in use: scrape configurations that list only those do not "
                "find this agent at %d",
                usual_ports()[0],
                usual_ports()[-1],
                port,
            )


def _explain(error: SettingError | OSError) -> None:
    if isinstance(error, SettingError):
        log.error("no metrics are served: %s", error)
    else:
        log.error("no metrics are served until the port is free: %s", error.strerror)
