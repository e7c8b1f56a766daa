import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mp_agent.probe.processes import node_agent
from mp_agent.probe.processes.node_agent import NodeAgentLauncher
from mp_agent.ring import locations, run_files
from mp_agent.settings import Settings
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    directory = locations.run_directory(tmp_path / "shm", "launch-test")
    directory.mkdir(parents=True, mode=0o700)
    yield directory
    if pid := _agent_pid(directory):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not locations.agent_running(directory), what="the agent's end")


@pytest.fixture
def launcher(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeAgentLauncher:
    monkeypatch.setattr(node_agent, "CHECK_INTERVAL_SECONDS", 0.0)
    return NodeAgentLauncher(run_dir, Settings(port=0, bind="127.0.0.1", log_dir=tmp_path / "log"))


def _agent_pid(run_dir: Path) -> int | None:
    """Return the running agent's pid; a status may still be that of one that was killed."""
    status = locations.read_status(run_dir)
    if status is None or not locations.agent_running(run_dir):
        return None
    return status.pid if _runs(status.pid) else None


def _runs(pid: int) -> bool:
    """Return whether a process runs; a zombie that was not reaped has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def _start(launcher: NodeAgentLauncher, run_dir: Path) -> int:
    def started() -> int | None:
        launcher.ensure_running()
        return _agent_pid(run_dir)

    return wait_until(started, seconds=30, what="a node agent")


def _kill(pid: int, run_dir: Path) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not locations.agent_running(run_dir), what="the agent's end")


def test_the_agent_is_detached_and_holds_none_of_the_jobs_descriptors(launcher, run_dir):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    pid = _start(launcher, run_dir)
    os.close(writing)
    assert os.read(reading, 1) == b"", "the agent holds the pipe: a reader would wait for it"
    os.close(reading)
    assert os.getsid(pid) != os.getsid(0)
    status = Path(f"/proc/{pid}/status").read_text()
    assert f"PPid:\t{os.getpid()}" not in status


def test_a_running_agent_is_left_alone(launcher, run_dir):
    pid = _start(launcher, run_dir)
    for _ in range(5):
        launcher.ensure_running()
    assert _agent_pid(run_dir) == pid


def test_an_agent_is_started_again_however_often_it_is_killed(
    launcher, run_dir, caplog, monkeypatch
):
    monkeypatch.setattr(run_files, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(run_files, "LONGEST_PAUSE_SECONDS", 0.05)
    pids = [_start(launcher, run_dir)]
    for _ in range(5):
        _kill(pids[-1], run_dir)
        pids.append(_start(launcher, run_dir))
    assert len(set(pids)) == 6
    assert caplog.text.count("the node agent died") == 1


def test_the_last_start_keeps_no_pause(launcher, run_dir, monkeypatch):
    monkeypatch.setattr(run_files, "FIRST_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(run_files, "LONGEST_PAUSE_SECONDS", 3600.0)
    _kill(_start(launcher, run_dir), run_dir)
    assert not launcher.ensure_running()
    assert launcher.ensure_running(at_once=True)
    wait_until(lambda: _agent_pid(run_dir), what="a node agent")


def test_the_token_is_handed_over_in_a_variable_of_its_own_and_nowhere_else(run_dir, tmp_path):
    settings = Settings(port=0, bind="127.0.0.1", log_dir=tmp_path / "log", token="top-secret")
    pid = _start(NodeAgentLauncher(run_dir, settings), run_dir)
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert [entry for entry in environment if b"top-secret" in entry] == [
        b"MP_AGENT_TOKEN=top-secret"
    ]
    handed_over = next(e for e in environment if e.startswith(b"MP_AGENT_NODE_SETTINGS="))
    assert b'"token"' not in handed_over
    assert b"top-secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
