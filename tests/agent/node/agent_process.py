"""A real node agent in a separate process, as a rank starts it."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from mp_agent.ring import locations
from mp_agent.ring.locations import AgentStatus
from mp_agent.settings import Settings
from mp_agent.settings.load import handed_over
from tests.waiting import wait_until

StartAgent = Callable[..., "subprocess.Popen[bytes]"]


def start_agent(settings: Settings, *arguments: object) -> "subprocess.Popen[bytes]":
    """Start `python -m mp_agent.node` with the arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "mp_agent.node", *map(str, arguments)],
        env={**os.environ, **handed_over(settings)},
    )


@contextmanager
def starting_agents(settings: Settings, run_dir: Path) -> Iterator[StartAgent]:
    """Yield what starts agents, with changed settings, for the run or as the arguments say.

    All are killed at the end.
    """
    with ExitStack() as stack:

        def start(*arguments: object, **changes: object) -> "subprocess.Popen[bytes]":
            changed = Settings(**{**dict(settings), **changes})
            agent = start_agent(changed, *(arguments or ("--run-dir", run_dir)))
            stack.callback(agent.wait)
            stack.callback(agent.kill)
            return agent

        yield start


def wait_for_status(run_dir: Path, *, pid: int | None = None) -> AgentStatus:
    """Return the status of a node agent that has looked at the run, of process `pid` if given."""

    def current() -> AgentStatus | None:
        status = locations.read_status(run_dir)
        return status if status and pid in (None, status.pid) else None

    return wait_until(current, what=f"a node agent's status in {run_dir}")


def wait_for_end(run_dir: Path) -> None:
    """Wait until the agent shows that the run has ended."""

    def ended() -> bool:
        status = locations.read_status(run_dir)
        return status is not None and scrape(status).get("run_active") == 0

    wait_until(ended, what=f"the end of the run in {run_dir}")


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
