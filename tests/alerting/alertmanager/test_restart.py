"""An Alertmanager that restarts in the middle of an incident, with the shipped configuration."""

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from mp_agent.alerting.alertmanager import render_alertmanager
from tests.waiting import wait_until
from tools.servers.running import serving
from tools.servers.webhook import WebhookReceiver

pytestmark = pytest.mark.e2e


def _send(url: str, *names: str) -> None:
    """Send alerts of one run, as Prometheus does again and again."""
    body = [
        {
            "labels": {
                "alertname": name,
                "severity": "critical",
                "component": "mp-agent",
                "run": "llama",
            },
            "annotations": {"summary": f"{name}."},
            "startsAt": "2026-01-02T03:04:05Z",
            "endsAt": "2126-01-02T03:04:05Z",
        }
        for name in names
    ]
    request = urllib.request.Request(
        f"{url}/api/v2/alerts", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=10).close()


def _log_queries(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    (count,) = re.findall(r"^alertmanager_nflog_queries_total (\S+)", text, flags=re.MULTILINE)
    return float(count)


def test_it_does_not_page_again_for_what_it_reported_but_for_what_is_new(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    first, later = "MpAgentNonFiniteUpdate", "MpAgentLossNonFinite"
    with WebhookReceiver() as webhook:
        file = tmp_path / "alertmanager.yaml"
        file.write_text(render_alertmanager("x", webhook_url=webhook.url, time_scale=1 / 60))
        arguments = [
            f"--config.file={file}",
            f"--storage.path={tmp_path / 'kept'}",
            "--cluster.listen-address=",
        ]
        with serving(server("alertmanager"), arguments, tmp_path / "alertmanager.log") as url:
            _send(url, first)
            wait_until(lambda: webhook.arrived, seconds=60, what="the first page")
            # It asks its log of notifications at each flush, and so has written the first.
            wait_until(lambda: _log_queries(url) >= 2, seconds=60, what="the second flush")
        with serving(server("alertmanager"), arguments, tmp_path / "alertmanager.log") as url:
            _send(url, first)
            # A second alert makes the group speak again; what it says then shows what it knew.
            _send(url, first, later)
            wait_until(
                lambda: any(alert.name == later for alert in webhook.arrived),
                seconds=60,
                what="the page of the new alert",
            )
    names = [alert.name for alert in webhook.arrived]
    assert names[0] == first
    assert sorted(names[1:]) == sorted([first, later]), "notified twice, before anything was new"
