"""Where alerts come from: the real servers with the shipped rules, else /metrics alone."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from examples.demo.reading import Reading
from mp_agent.alerting.alertmanager import render_alertmanager
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.remedies import fitting
from mp_agent.alerting.rules import RULES_FILE
from mp_agent.alerting.values import values_in_force
from tools.jobs import ROOT
from tools.servers.binaries import find
from tools.servers.running import Prometheus, alertmanager, prometheus
from tools.servers.webhook import Notification, WebhookReceiver

SHIPPED_RULES = ROOT / "alerting" / "rendered" / RULES_FILE
_WAITING_SCALE = 0.05
"""Alertmanager waits for alerts that belong together: minutes as shipped, seconds here."""


class AlertSource(Protocol):
    """A source of alerts."""

    def describe(self) -> Sequence[str]:
        """Return what the alerts come from, in words."""

    def watch(self, run: str, address: str) -> None:
        """Look at the run whose node agent serves metrics at `address` (host:port)."""

    def firing(self, run: str, reading: Reading | None) -> Sequence[Notification]:
        """Return the alerts of a run so far, in the order in which they came."""


class RealServers:
    """Prometheus and Alertmanager; what arrives at the webhook is an alert."""

    def __init__(self, running: Prometheus, alertmanager_url: str, hook: WebhookReceiver) -> None:
        self._prometheus = running
        self._alertmanager_url = alertmanager_url
        self._webhook = hook

    def describe(self) -> Sequence[str]:
        """Return where the servers are."""
        return (
            f"Prometheus at {self._prometheus.url}, with {SHIPPED_RULES.relative_to(ROOT)}",
            f"Alertmanager at {self._alertmanager_url}, sending to {self._webhook.url}",
        )

    def watch(self, run: str, address: str) -> None:
        """Have Prometheus scrape the node agent."""
        self._prometheus.scrape([address])

    def firing(self, run: str, reading: Reading | None) -> Sequence[Notification]:
        """Return what arrived at the webhook for `run`."""
        return self._webhook.firing(run=run)


class MetricsAlone:
    """Without servers: only what a single reading of /metrics shows."""

    def __init__(self) -> None:
        self._fired: dict[str, tuple[Notification, ...]] = {}

    def describe(self) -> Sequence[str]:
        """Return what is missing, and what is done instead."""
        return (
            "Prometheus and Alertmanager are not on PATH, and apt cannot install them here.",
            "Instead, the counters on the node agent's /metrics are looked at directly.",
        )

    def watch(self, run: str, address: str) -> None:
        """Take note of nothing: readings are handed in."""

    def firing(self, run: str, reading: Reading | None) -> Sequence[Notification]:
        """Return the conditions that a reading has shown so far."""
        fired = self._fired.get(run, ())
        names = {alert.name for alert in fired}
        if reading is not None:
            fired += tuple(
                _notification(name, run, reading)
                for name, holds in _SHOWN_BY_METRICS.items()
                if name not in names and holds(reading)
            )
        self._fired[run] = fired
        return fired


_SHOWN_BY_METRICS: Mapping[str, Callable[[Reading], bool]] = {
    "MpAgentGradientExplosion": lambda now: any(
        steps > 0 for steps in now.by("mp_agent_grad_exploded_steps_total", "bound").values()
    ),
    "MpAgentNonFiniteUpdate": lambda now: now.count("mp_agent_nonfinite_updates_total") > 0,
    "MpAgentLossNonFinite": lambda now: now.count("mp_agent_loss_nonfinite_steps_total") >= 3,
    "MpAgentLossScaleAtFloor": lambda now: now.count("mp_agent_loss_scale_floor_skips_total") >= 3,
}


def _notification(name: str, run: str, reading: Reading) -> Notification:
    condition = next(known for known in CONDITIONS if known.name == name)
    level = condition.levels[0]
    annotations = dict(condition.annotations(level, values_in_force()))
    # Prometheus would fill in their templates.
    del annotations["description"]
    annotations["remedy"] = " ".join(fitting(condition.remedies, reading.labels_of))
    labels = {"alertname": name, "run": run, **level.labels}
    return Notification("firing", labels, annotations, time.time())


@contextmanager
def alert_source(directory: Path) -> Iterator[AlertSource]:
    """Start the servers if they can be had, and stop them at the end."""
    binaries = find("prometheus"), find("alertmanager")
    if binaries[0] is None or binaries[1] is None:
        yield MetricsAlone()
        return
    with WebhookReceiver() as webhook:
        configuration = render_alertmanager(
            "Written by the demo.", webhook_url=webhook.url, time_scale=_WAITING_SCALE
        )
        with (
            alertmanager(binaries[1], directory / "alertmanager", configuration) as url,
            prometheus(
                binaries[0], directory / "prometheus", rules=SHIPPED_RULES, alertmanager_url=url
            ) as running,
        ):
            yield RealServers(running, url, webhook)
