"""What a real Alertmanager with the shipped configuration makes of an incident's alerts."""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import yaml

from mp_agent.alerting.alertmanager import MESSAGES, MESSAGES_FILE, render_alertmanager
from mp_agent.alerting.alertmanager.channels import Channel, Site
from tests.alerting.alertmanager.inboxes import Inboxes, inboxes
from tests.alerting.pages.faults import Fired
from tests.waiting import wait_until
from tools.servers.running import alertmanager, read_json

_TIME_SCALE = 1 / 20
_BEGAN = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
"""When every run began."""
_MARGIN = timedelta(minutes=1)
"""Longer than it takes a busy machine to send alerts."""
_ADDRESS = "http://alertmanager.example"


def deliver(
    alerts: Mapping[str, Sequence[Fired]], alertmanager_binary: Path, directory: Path
) -> dict[str, dict[str, Any]]:
    """Return by run what the person on call gets, and what becomes of the alerts that do not page.

    webhook: the payload. page: the lines of the mail, which are those of a page too. tickets,
    muted: the alerts that go to the tickets, and those that are not sent.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with inboxes() as inbox:
        (directory / MESSAGES_FILE).write_text(MESSAGES)
        (directory / "webhook_url").write_text(f"{inbox.http_url}/webhook")
        site = Site(secrets_dir=str(directory), smarthost=inbox.smarthost, email_user="")
        channels = (Channel.EMAIL, Channel.WEBHOOK)
        text = render_alertmanager("x", channels=channels, site=site, time_scale=_TIME_SCALE)
        with alertmanager(alertmanager_binary, directory, _without_tls(text)) as url:
            every = [alert for of_run in alerts.values() for alert in of_run]
            sent_at = _moments([alert.since_seconds for alert in every])
            _send(url, every, sent_at)
            delivered = {run: _delivered(run, url, inbox, len(alerts[run])) for run in alerts}
    return {run: _as_it_began(page, sent_at) for run, page in delivered.items()}


def _moments(since_seconds: Sequence[float]) -> dict[float, datetime]:
    """Return by beginning when an alert begins for Alertmanager: once it has received them all.

    A group whose first alert is older than `group_wait` is sent at once, without those that come
    with it.
    """
    now = datetime.now(UTC).replace(microsecond=0) + _MARGIN
    return {
        since: now + timedelta(seconds=rank)
        for rank, since in enumerate(sorted(set(since_seconds)))
    }


def _as_it_began(page: dict[str, Any], sent_at: Mapping[float, datetime]) -> dict[str, Any]:
    """Return a page with the moments at which its alerts fired first."""
    text = json.dumps(page)
    for since, moment in sent_at.items():
        for form in ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S"):
            began = _BEGAN + timedelta(seconds=since)
            text = text.replace(moment.strftime(form), began.strftime(form))
    dated: dict[str, Any] = json.loads(text)
    return dated


def _without_tls(configuration: str) -> str:
    document = yaml.safe_load(configuration)
    for receiver in document["receivers"]:
        for mail in receiver.get("email_configs", ()):
            mail["require_tls"] = False
    return yaml.safe_dump(document)


def _send(url: str, alerts: Sequence[Fired], sent_at: Mapping[float, datetime]) -> None:
    now = datetime.now(UTC)
    body = [
        {
            "labels": dict(alert.labels),
            "annotations": dict(alert.annotations),
            "startsAt": sent_at[alert.since_seconds].isoformat(),
            "endsAt": (now + timedelta(hours=1)).isoformat(),
        }
        for alert in alerts
    ]
    request = urllib.request.Request(
        f"{url}/api/v2/alerts", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=30).close()


def _delivered(run: str, url: str, inbox: Inboxes, count: int) -> dict[str, Any]:
    payload = wait_until(lambda: _of_on_call(inbox, run), seconds=60, what=f"the page of {run}")
    mail = wait_until(lambda: _mail(inbox, run), seconds=60, what=f"the mail of {run}")
    states = wait_until(lambda: _states(url, run, count), seconds=60, what=f"the states of {run}")
    body = mail.get_body(("plain",))
    assert body is not None
    outside = str(payload["externalURL"])  # with the machine's name
    page = [str(mail["Subject"]), *body.get_content().strip().splitlines()]
    tickets = [name for name, state in states if state == "active" and "critical" not in name]
    return {
        "webhook": _normal(payload),
        "page": [line.replace(outside, _ADDRESS) for line in page],
        "tickets": tickets,
        "muted": [name for name, state in states if state == "suppressed"],
    }


def _of_on_call(inbox: Inboxes, run: str) -> dict[str, Any] | None:
    found = (
        message
        for message in inbox.at("/webhook")
        if message["receiver"] == "on-call" and message["commonLabels"]["run"] == run
    )
    return next(found, None)


def _mail(inbox: Inboxes, run: str) -> EmailMessage | None:
    start = f"[CRITICAL] run {run}:"
    return next((m for m in inbox.mails if str(m["Subject"]).startswith(start)), None)


def _states(url: str, run: str, count: int) -> list[tuple[str, str]]:
    """Return the alerts of a run as `name severity` with their states, once all are known."""
    found = [a for a in read_json(f"{url}/api/v2/alerts") if a["labels"]["run"] == run]
    if len(found) < count or any(a["status"]["state"] == "unprocessed" for a in found):
        return []
    return sorted(
        (f"{a['labels']['alertname']} {a['labels']['severity']}", a["status"]["state"])
        for a in found
    )


def _normal(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a payload without what differs from one delivery to the next."""
    for alert in payload["alerts"]:
        alert.pop("endsAt", None)
    payload["alerts"].sort(key=lambda alert: str(alert["labels"]))
    normal: dict[str, Any] = json.loads(
        json.dumps(payload).replace(payload["externalURL"], _ADDRESS)
    )
    return normal
