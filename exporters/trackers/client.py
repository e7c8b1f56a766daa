"""Experiment trackers: what each needs (client, links, values to log), and what sends to them."""

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol, cast
from urllib.parse import SplitResult, urlsplit

from mp_agent.catalog.metric import Scope, Snapshot
from mp_agent.inputs.addresses import is_loopback
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.views import ExportAccount, TrackerLink


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker is to show it."""

    name: str
    directory: Path
    """Where a tracker keeps files on this machine; exists."""


class TrackerClient(Protocol):
    """One run in one tracker. Used by one thread; calls may block, and raise anything."""

    name: str
    """What the tracker calls the run."""
    url: str
    """Where the run can be seen: a page, or files on this machine; empty where neither is."""

    def log(self, values: Mapping[str, float], step: int, time_unix_seconds: float) -> None:
        """Send numbers of a step."""

    def close(self) -> None:
        """Send what is buffered, and mark the run as finished."""


OpenClient = Callable[[TrackedRun], TrackerClient]


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


PREFIX = "mp_agent/"
_SINCE = "mp_agent.nonfinite.since_step"
_OF_FINITE = {
    "loss": ("loss",),
    "gradients": (
        *("grad_norm", "grad_abs_max", "grad_abs_min", "grad_zero", "grad_fp16_headroom"),
        "clip_coefficient",
    ),
}
"""Gauges that keep their last value while the loss, or the gradients, are NaN or Inf."""


def values_by_run(snapshot: Snapshot) -> Mapping[str, Mapping[str, float]]:
    """Return by run the metrics without labels of their own, by name, as `mp_agent/<name>`.

    Histograms, info metrics, and series of layers, ranks, nodes and optimizers are left out; and so
    is a value from before a NaN or Inf that goes on, so that its curve ends there.
    """
    found: dict[str, dict[str, float]] = {}
    old: list[tuple[str, str]] = []
    for family in snapshot:
        metric = family.metric
        if metric.name == _SINCE:
            old += [(sample.labels[0], sample.labels[1]) for sample in family.samples]
        if metric.scope is not Scope.RUN or metric.labels:
            continue
        name = PREFIX + metric.name.removeprefix("mp_agent.").replace(".", "_")
        for sample in family.samples:
            run, *others = sample.labels
            if isinstance(sample.value, float | int) and not any(others):
                found.setdefault(run, {})[name] = float(sample.value)
    for run, quantity in old:
        for name in _OF_FINITE[quantity]:
            found.get(run, {}).pop(PREFIX + name, None)
    return found


def values_of_event(event: StoredConditionEvent) -> Mapping[str, float]:
    """Return 1 for a condition that began to hold, 0 for one that ceased, under its name."""
    name = f"{PREFIX}condition/{event.condition.name}/{event.condition.severity}"
    return {name: float(event.state != "resolved")}


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
