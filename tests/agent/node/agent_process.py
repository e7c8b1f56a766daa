"""A real node agent in a process of its own, as a rank starts it."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from mp_agent.node.main import SETTINGS_VARIABLE
from mp_agent.ring import locations
from mp_agent.ring.locations import AgentStatus
from mp_agent.settings import Settings
from tests.waiting import wait_until


def start_agent(settings: Settings, *arguments: object) -> "subprocess.Popen[bytes]":
    """Start `python -m mp_agent.node` with the arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "mp_agent.node", *map(str, arguments)],
        env={**os.environ, SETTINGS_VARIABLE: json.dumps(settings.model_dump(mode="json"))},
    )


def wait_for_status(run_dir: Path, *, pid: int | None = None) -> AgentStatus:
    """Return the status of a node agent that has looked at the run, of process `pid` if given."""

    def current() -> AgentStatus | None:
        status = locations.read_status(run_dir)
        return status if status and pid in (None, status.pid) else None

    return wait_until(current, what=f"a node agent's status in {run_dir}")


def get(url: str, headers: Mapping[str, str] | None = None) -> tuple[bytes, Mapping[str, str]]:
    """Return body and headers of an answer that must be 200."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers or {}))) as answer:
        return answer.read(), answer.headers


def scrape(status: AgentStatus, **headers: str) -> dict[str, float]:
    """Return what /metrics shows, by name and the values of all labels but `run`."""
    body, _ = get(f"{status.url}/metrics", headers)
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(v for k, v in sorted(sample.labels.items()) if k != "run")
            name = sample.name.removeprefix("mp_agent_")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found
