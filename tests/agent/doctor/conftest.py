"""What tests of the doctor look at: ranks, node agents, servers, and what was found of them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mp_agent.doctor.command import MACHINE_CHECKS, PROMETHEUS_CHECKS
from mp_agent.doctor.machine import CheckResult, CheckStatus, Machine
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.agent_process import StartAgent, start_agent, starting_agents
from tests.agent.node.conftest import run_dir, settings, start_rank  # noqa: F401
from tests.agent.node.fake_rank import FakeRank
from tests.waiting import wait_until

CHECKS = {check.name: check for check in (*MACHINE_CHECKS, *PROMETHEUS_CHECKS)}


def found(check: str, machine: Machine) -> list[CheckResult]:
    """Return what one check finds."""
    return list(CHECKS[check].examine(machine))


def verdicts(check: str, machine: Machine) -> set[CheckStatus]:
    return {finding.verdict for finding in found(check, machine)}


def only(check: str, machine: Machine) -> CheckResult:
    """Return the one finding of a check."""
    (finding,) = found(check, machine)
    return finding


@pytest.fixture
def start(run_dir: Path, settings: Settings) -> Iterator[StartAgent]:  # noqa: F811
    """Start a node agent for the run, and wait until it has looked."""
    with starting_agents(settings, run_dir) as start_:

        def and_wait(**changes: Any) -> "subprocess.Popen[bytes]":
            agent = start_(**changes)
            _await(agent, run_dir)
            return agent

        yield and_wait


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a run with a living rank and its node agent; not to be disturbed."""
    base = tmp_path_factory.mktemp("watched")
    settings_ = Settings(
        port=0,
        bind="127.0.0.1",
        dir=base / "shm",
        log_dir=base / "log",
        flight_dir=base / "flight",
        linger_seconds=60,
    )
    directory = locations.run_directory(settings_.dir, "llama")
    with FakeRank(directory) as rank:
        rank.steps(3, loss=1.5)
        agent = start_agent(settings_, "--run-dir", directory)
        try:
            _await(agent, directory)
            yield settings_
        finally:
            agent.kill()
            agent.wait()


def _await(agent: "subprocess.Popen[bytes]", directory: Path) -> None:
    def said() -> bool:
        status = locations.read_status(directory)
        return status is not None and status.pid == agent.pid

    wait_until(said, seconds=60, what=f"a node agent's status in {directory}")


@contextmanager
def answering(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    """Serve bodies by path, whatever the query; anything else is not found. Yields the URL."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path.partition("?")[0], (404, ""))
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _no_settings_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MP_AGENT_")]:
        monkeypatch.delenv(name)
