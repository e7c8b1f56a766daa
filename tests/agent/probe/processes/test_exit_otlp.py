"""How long the end of a rank waits for a push by OTLP."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mp_agent.probe.processes.exit import wait_for_export
from mp_agent.ring import locations
from mp_agent.ring.locations import AgentStatus
from mp_agent.ring.writer import RingWriter
from tests.waiting import wait_until

PENDING = AgentStatus(
    pid=1,
    host="host",
    port=0,
    url="",
    scrapes_total=0,
    final_exported=False,
    started_unix_ns=1,
    otlp_pending=True,
)


class Writer(RingWriter):
    """Notes what a ring would show of the waiting."""

    def __init__(self) -> None:
        self.waiting: list[bool] = []

    def wait_for_export(self, waits: bool) -> None:
        self.waiting.append(waits)


@pytest.fixture
def wait(tmp_path: Path):
    """Wait for a node agent that holds its lock; return the seconds that it took."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    lock_fd = locations.hold_agent_lock(run_dir)
    assert lock_fd is not None

    def wait_(status: AgentStatus, limit: float, otlp_limit: float, then=lambda: None) -> float:
        locations.write_status(run_dir, status)
        writer = Writer()
        helper = threading.Thread(target=lambda: (wait_until(lambda: writer.waiting), then()))
        helper.start()
        started = time.monotonic()
        wait_for_export(writer, run_dir, limit, otlp_limit)
        seconds = time.monotonic() - started
        writer.wait_for_export(False)
        helper.join()
        return seconds

    waiting: Any = wait_
    waiting.run_dir = run_dir
    yield waiting
    os.close(lock_fd)


def test_a_push_that_arrives_ends_the_waiting(wait):
    def pushed() -> None:
        locations.write_status(wait.run_dir, replace(PENDING, otlp_pending=False))

    assert wait(PENDING, 20.0, 20.0, pushed) < 10.0


@pytest.mark.parametrize(("limit", "otlp_limit"), [(20.0, 0.3), (0.3, 20.0), (20.0, 0.0)])
def test_an_endpoint_that_takes_nothing_is_waited_for_no_longer_than_its_bound(
    wait, limit, otlp_limit
):
    seconds = wait(PENDING, limit, otlp_limit)
    assert min(limit, otlp_limit) <= seconds < 5.0


def test_who_scrapes_is_waited_for_beyond_the_bound_of_otlp(wait):
    assert wait(replace(PENDING, scrapes_total=3), 0.6, 0.1) >= 0.6


def test_no_agent_is_waited_for_when_nothing_is_pushed(wait):
    assert wait(replace(PENDING, otlp_pending=False), 20.0, 20.0) < 5.0
