"""Two Prometheus servers scrape one node agent: nothing is counted twice, and one page goes out."""

import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mp_agent.alerting.alertmanager import render_alertmanager
from mp_agent.ring import locations
from tests.agent.node.agent_process import StartAgent
from tests.agent.node.conftest import StartRank
from tests.waiting import wait_until
from tools.servers.running import Prometheus, alertmanager, prometheus, read_json
from tools.servers.webhook import WebhookReceiver

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALERT = "MpAgentNonFiniteUpdate"
UPDATES = 3
SAMPLES = 10
"""Before the updates: Prometheus extrapolates what rises by up to one sample in so many."""


def fired(watching: Prometheus) -> list[dict[str, Any]]:
    """Return the alerts on updates that fire with all of them counted, or more."""
    return [
        alert
        for alert in watching.alerts()
        if alert["labels"]["alertname"] == ALERT
        and alert["state"] == "firing"
        and float(alert["value"]) >= UPDATES
    ]


def test_two_live_replicas_count_once_and_page_once(
    server: Any, start_rank: StartRank, start: StartAgent, run_dir: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    command = [sys.executable, "-m", "mp_agent", "rules", "--output", str(rules)]
    subprocess.run(command, check=True)
    rank = start_rank()
    rank.steps(20, loss=2.0, gradients={"sum_squares": 4.0})
    start()

    def serving() -> str:
        status = locations.read_status(run_dir)
        return status.url.removeprefix("http://") if status and status.port else ""

    address = wait_until(serving, seconds=90, what="the node agent")
    with ExitStack() as stack:
        webhook = stack.enter_context(WebhookReceiver())
        routes = render_alertmanager("Tested.", webhook_url=webhook.url, time_scale=0.1)
        pager = stack.enter_context(
            alertmanager(server("alertmanager"), tmp_path / "alertmanager", routes)
        )

        def replica(name: str, **options: Any) -> Prometheus:
            return stack.enter_context(
                prometheus(
                    server("prometheus"),
                    tmp_path / name,
                    rules=rules,
                    alertmanager_url=pager,
                    replica=name,
                    **options,
                )
            )

        pair = [replica(name) for name in "ab"]
        for one in pair:
            one.scrape([address])
        both = replica("both", federated=[one.url for one in pair])
        samples = f'count_over_time(mp_agent_steps_total{{run="llama"}}[5m]) >= {SAMPLES}'
        wait_until(
            lambda: len(both.query(samples)) == 2, seconds=90, what="both replicas' series in one"
        )
        rank.steps(UPDATES, loss=2.0, gradients={"sum_squares": 4.0, "nan_elements": 1.0})
        for one in (*pair, both):
            (alert,) = wait_until(partial(fired, one), seconds=90, what=f"alert at {one.url}")
            assert UPDATES <= float(alert["value"]) < 1.5 * UPDATES
            assert "replica" not in alert["labels"]
        paged = wait_until(lambda: webhook.firing(run="llama", alertname=ALERT), seconds=90)
        assert len(paged) == 1
        alerts = read_json(f"{pager}/api/v2/alerts")
        held = [one for one in alerts if one["labels"]["alertname"] == ALERT]
        assert len(held) == 1, "what the three servers send is one alert"
        assert len(webhook.firing(run="llama", alertname=ALERT)) == 1
