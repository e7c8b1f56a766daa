"""What every experiment tracker needs: its client, links to runs, and values to log."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from mp_agent.catalog.metric import Scope, Snapshot
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.views import TrackerLink


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
