"""Sends metrics and conditions to the experiment trackers that a run asks for."""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from mp_agent.exporters.trackers.client import OpenClient, TrackedRun, TrackerClient, link_of
from mp_agent.inputs.addresses import is_loopback
from mp_agent.records.views import ExportAccount, TrackerLink

_CLIENTS = {
    "comet": ("mp_agent.exporters.trackers.comet", "CometClient"),
    "wandb": ("mp_agent.exporters.trackers.wandb", "WandbClient"),
    "mlflow": ("mp_agent.exporters.trackers.mlflow", "MlflowRunClient"),
    "tensorboard": ("mp_agent.exporters.trackers.tensorboard", "TensorBoardClient"),
}
"""Module and class, by the name in the setting `trackers`."""


_ADDRESSES = {
    "comet": "COMET_URL_OVERRIDE",
    "wandb": "WANDB_BASE_URL",
    "mlflow": "MLFLOW_TRACKING_URI",
}
"""The variable that names a tracker's server."""


def go_direct_to_this_machine(tracker: str, environ: MutableMapping[str, str]) -> None:
    """Exempt a tracker's server from the environment's proxies where it is on this machine."""
    try:
        host = urlsplit(environ.get(_ADDRESSES.get(tracker, ""), "")).hostname or ""
    except ValueError:
        return
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY", "")
    if is_loopback(host) and host not in exempt.split(","):
        environ["no_proxy"] = environ["NO_PROXY"] = ",".join(filter(None, (exempt, host)))


def open_client(tracker: str, run: TrackedRun) -> TrackerClient:
    """Open a run in a tracker, whose package is imported, which may take seconds.

    Raises ImportError where the package is missing, and whatever the tracker raises.
    """
    module, name = _CLIENTS[tracker]
    go_direct_to_this_machine(tracker, os.environ)
    return cast(OpenClient, getattr(import_module(module), name))(run)


log = logging.getLogger("mp_agent.trackers")

WAITING_MAX = 100
REOPEN_AFTER_SECONDS = 60.0


class Entry(NamedTuple):
    """Numbers of a step."""

    values: Mapping[str, float]
    step: int
    time_unix_seconds: float


class TrackerSender:
    """A queue that `send` never waits for, and a daemon thread that empties it.

    What does not fit into the queue, or fails, is dropped and counted.
    """

    def __init__(self, tracker: str, run: TrackedRun, open_client: OpenClient) -> None:
        self.tracker = tracker
        self._run = run
        self._open_client = open_client
        self._waiting: queue.Queue[Entry | None] = queue.Queue(WAITING_MAX)
        self._client: TrackerClient | None = None
        self.link: TrackerLink | None = None
        """Where the tracker shows the run; None before it is opened there."""
        self._open_again_seconds = float("-inf")
        self._failures, self._dropped = 0, 0
        self._last_success_unix_seconds: float | None = None
        # Not an executor: the interpreter joins its threads at exit.
        self._thread = threading.Thread(target=self._work, name=f"tracker {tracker}", daemon=True)
        self._thread.start()

    @property
    def account(self) -> ExportAccount:
        """The outcomes so far."""
        return ExportAccount(
            exporter=self.tracker,
            failures=self._failures,
            rejected=self._dropped,
            last_success_unix_seconds=self._last_success_unix_seconds,
        )

    def send(self, entry: Entry) -> None:
        """Queue numbers."""
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._dropped += len(entry.values)

    def close(self) -> None:
        """Let the thread send what is queued, close the tracker's run, and end."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            self._dropped += len(getattr(self._waiting.get_nowait(), "values", ()))
            self._waiting.put_nowait(None)

    @property
    def closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._waiting.get()) is not None:
            try:
                if (client := self._opened()) is None:
                    self._dropped += len(entry.values)
                    continue
                client.log(entry.values, entry.step, entry.time_unix_seconds)
                self._last_success_unix_seconds = time.time()
            except Exception as error:
                self._dropped += len(entry.values)
                self._fail(error)
        try:
            if self._client is not None:
                self._client.close()
        except Exception as error:
            self._fail(error)

    def _opened(self) -> TrackerClient | None:
        """Return the client; None while a failed opening is not to be repeated yet."""
        if self._client is None:
            if time.monotonic() < self._open_again_seconds:
                return None
            self._open_again_seconds = time.monotonic() + REOPEN_AFTER_SECONDS
            self._client = self._open_client(self._run)
            self.link = link_of(self.tracker, self._client)
            if self.link.url:
                log.info("run %s is shown at %s", self._run.name, self.link.url)
        return self._client

    def _fail(self, error: Exception) -> None:
        """Count a failure, and log the first one: an outage may last hours."""
        self._failures += 1
        if self._failures == 1:
            # Any other message may hold a key.
            what = str(error) if isinstance(error, ImportError) else type(error).__name__
            log.warning("%s: run %s: %s", self.tracker, self._run.name, what)
