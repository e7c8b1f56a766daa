"""`mp-agent exec` with real jobs; a job is a Python script that is watched, or one that is not."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mp_agent.ring import locations
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long]

_WATCHED = """
import sys, torch, mp_agent
mp_agent.init(run="exec-test")
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
(weight * 2).sum().backward()
optimizer.step()
sys.exit(int(sys.argv[1]))
"""


@contextmanager
def _supervised(
    directory: Path, *command: str, linger_seconds: float = 0.5
) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "MP_AGENT_DIR": str(directory),
        "MP_AGENT_LINGER_SECONDS": str(linger_seconds),
        "MP_AGENT_PORT": "0",
        "MP_AGENT_BIND": "127.0.0.1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "mp_agent", "exec", "--", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _python(script: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script, *arguments)


@pytest.mark.parametrize("code", [0, 7])
def test_the_jobs_exit_code_is_returned_and_nothing_is_left(tmp_path, code):
    with _supervised(tmp_path, *_python(_WATCHED, str(code))) as supervisor:
        assert supervisor.wait(60) == code
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_dies_of_a_signal_gives_the_shells_code(tmp_path):
    kill_self = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with _supervised(tmp_path, *_python(kill_self)) as supervisor:
        assert supervisor.wait(60) == 128 + signal.SIGKILL


def test_a_command_that_does_not_exist_is_said_so(tmp_path):
    with _supervised(tmp_path, "no-such-trainer") as supervisor:
        output, _ = supervisor.communicate(timeout=60)
        assert supervisor.returncode == 127
    assert "no-such-trainer: No such file" in output


def test_a_job_without_shared_memory_runs_unwatched(tmp_path):
    (tmp_path / "file").touch()
    with _supervised(tmp_path / "file" / "below", *_python(_WATCHED, "7")) as supervisor:
        output, _ = supervisor.communicate(timeout=60)
        assert supervisor.returncode == 7
    assert "the job runs unwatched" in output


def test_signals_reach_the_job(tmp_path):
    """The job ends with 42 because the signal asks it to; without that it would wait for ever."""
    job = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    with _supervised(tmp_path, *_python(job)) as supervisor:
        assert supervisor.stdout is not None
        while "ready" not in supervisor.stdout.readline():
            pass
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(60) == 42


def test_the_last_state_of_a_crashed_job_is_served_for_the_linger(tmp_path):
    script = _WATCHED.replace("sys.exit(int(sys.argv[1]))", "raise RuntimeError('bad batch')")
    with _supervised(tmp_path, *_python(script), linger_seconds=60) as supervisor:
        url = wait_until(lambda: _url(tmp_path), seconds=60, what="the agent's endpoint")
        ended = 'mp_agent_run_end_info{reason="failed",run="exec-test"} 1.0'
        wait_until(lambda: ended in _metrics(url), seconds=60, what="the end of the run")
        assert 'mp_agent_run_active{run="exec-test"} 0.0' in _metrics(url)
        wait_until(lambda: len(_children(supervisor.pid)) == 1, seconds=60, what="the job's end")
        assert supervisor.poll() is None
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(60) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_dies_is_started_again(tmp_path):
    waiting = _WATCHED.replace("sys.exit", "import time; time.sleep(60); sys.exit")
    with _supervised(tmp_path, *_python(waiting, "0")) as supervisor:
        wait_until(lambda: _url(tmp_path), seconds=60, what="the agent's endpoint")
        first = _agent_pid(tmp_path)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: _agent_pid(tmp_path) != first, seconds=60, what="another agent")
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait(60)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _status(base: Path) -> locations.AgentStatus | None:
    for directory in base.glob("exec-*"):
        for run_dir in locations.find_runs(directory):
            return locations.read_status(run_dir)
    return None


def _url(base: Path) -> str:
    status = _status(base)
    return status.url if status else ""


def _agent_pid(base: Path) -> int:
    status = _status(base)
    assert status is not None
    return status.pid


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text: str = response.read().decode()
        return text
