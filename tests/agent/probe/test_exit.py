"""Each case runs a real interpreter to its end and looks at what it left behind."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mp_agent.probe.exit import wait_for_export
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader

_SETTINGS = "node_agent='none', run='exit-test'"


def _run(body: str, directory: Path) -> subprocess.CompletedProcess[str]:
    script = f"""
import os, signal, sys, torch, mp_agent
mp_agent.init({_SETTINGS}, dir={str(directory)!r})
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
def step():
    (weight * 2).sum().backward()
    optimizer.step()
step()
{textwrap.dedent(body)}
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def _reader(directory: Path) -> RingReader:
    (path,) = locations.find_rings(locations.run_directory(directory, "exit-test"))
    return RingReader.open(path)


@pytest.mark.parametrize(
    ("body", "reason", "code"),
    [
        ("", EndReason.COMPLETED, 0),
        ("mp_agent.shutdown()", EndReason.COMPLETED, 0),
        ("sys.exit(0)", EndReason.COMPLETED, 0),
        ("sys.exit()", EndReason.COMPLETED, 0),
        ("sys.exit(3)", EndReason.FAILED, 3),
        ("sys.exit('broken data')", EndReason.FAILED, 1),
        ("raise RuntimeError('bad batch')", EndReason.FAILED, 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", EndReason.RUNNING, -9),
        ("os.kill(os.getpid(), signal.SIGTERM)", EndReason.RUNNING, -15),
        ("os._exit(0)", EndReason.RUNNING, 0),
    ],
)
def test_the_ring_tells_how_the_process_ended(tmp_path, body, reason, code):
    result = _run(body, tmp_path)
    assert result.returncode == code, result.stderr
    reader = _reader(tmp_path)
    assert reader.state.end_reason is reason
    assert not reader.writer_alive()
    reader.close()


@pytest.mark.parametrize(
    "death",
    [
        "raise RuntimeError('bad batch')",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_the_step_under_way_at_a_crash_reaches_the_ring(tmp_path, death):
    """The optimizer dies after the gradients were measured: they are in the open record."""
    _run(
        f"""
        class Broken(torch.optim.SGD):
            def step(self, closure=None):
                {death}
        optimizer.zero_grad()
        broken = Broken([weight], lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: broken.step())
        (weight * 5).sum().backward()
        optimizer.step()
        """,
        tmp_path,
    )
    reader = _reader(tmp_path)
    schema = reader.schema
    assert schema is not None
    complete, _ = reader.steps_after(0)
    record = reader.open_record()
    assert [step.sequence for step in complete] == [1]
    assert record is not None and record.sequence == 2
    squares = record.gradients[0][schema.gradient_columns.index("sum_squares")]
    assert squares == pytest.approx(3 * 5.0**2)
    reader.close()


def test_an_exception_keeps_its_traceback_and_the_users_excepthook(tmp_path):
    result = _run(
        """
        before = sys.excepthook
        def mine(kind, error, trace):
            print("mine saw", error, file=sys.stderr)
            before(kind, error, trace)
        sys.excepthook = mine
        raise ValueError("no such shard")
        """,
        tmp_path,
    )
    assert "mine saw no such shard" in result.stderr
    assert "ValueError: no such shard" in result.stderr
    assert _reader(tmp_path).state.end_reason is EndReason.FAILED


def test_a_forked_child_that_ends_leaves_the_parents_ring_alone(tmp_path):
    result = _run(
        """
        child = os.fork()
        if child == 0:
            sys.exit(7)
        assert os.waitpid(child, 0)[1] == 7 << 8
        step()
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    reader = _reader(tmp_path)
    assert reader.state.end_reason is EndReason.COMPLETED
    assert reader.state.committed_sequence == 2
    reader.close()


def test_a_spawned_data_worker_that_imports_the_script_makes_no_ring_of_its_own(tmp_path):
    """Under torchrun's variables, where a ring is otherwise made by init() at once."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import torch, mp_agent
mp_agent.init({_SETTINGS}, dir={str(tmp_path / "shm")!r})
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="spawn")
    assert sorted(int(batch) for batch in loader) == [0, 1, 2, 3]
"""
    )
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    subprocess.run([sys.executable, str(script)], check=True, env=environment)
    run_dir = locations.run_directory(tmp_path / "shm", "exit-test")
    assert len(locations.find_rings(run_dir)) == 1


def test_everything_is_a_no_op_when_disabled(tmp_path):
    script = "import mp_agent; mp_agent.init(); mp_agent.observe(loss=1.0); mp_agent.shutdown()"
    environment = {"MP_AGENT_ENABLED": "0", "MP_AGENT_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert list(tmp_path.iterdir()) == []


def test_importing_starts_no_thread_opens_no_socket_and_leaves_torch_alone():
    script = (
        "import os, sys, threading, mp_agent\n"
        "assert 'torch' not in sys.modules and threading.active_count() == 1\n"
        "fds = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]]\n"
        "assert not any(fd.startswith('socket:') for fd in fds), fds\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


class TestExitWait:
    """Local rank 0 of a good end, with an agent whose status the test writes."""

    @pytest.fixture
    def waits(self, tmp_path, monkeypatch):
        """Return a function: does it wait, to its limit, while the status says this?"""
        directory = tmp_path / "run"
        directory.mkdir(mode=0o700)
        monkeypatch.setattr(locations, "agent_running", lambda run_dir: True)

        class Writer:
            def wait_for_export(self, waiting: bool) -> None:
                pass

        def waits(**changes: object) -> bool:
            status = locations.AgentStatus(
                pid=1,
                host="host",
                port=1,
                url="",
                started_unix_ns=0,
                **{"scrapes_total": 0, "final_exported": False, **changes},
            )
            locations.write_status(directory, status)
            began = time.monotonic()
            wait_for_export(Writer(), directory, 0.2)
            return time.monotonic() - began >= 0.2

        return waits

    def test_a_root_that_takes_what_is_pushed_is_waited_for(self, waits):
        assert waits(pushes_total=3)
        assert not waits(pushes_total=3, final_pushed=True)

    def test_a_root_that_never_took_anything_is_not(self, waits):
        assert not waits()

    def test_a_scraper_and_a_root_are_both_waited_for(self, waits):
        assert waits(scrapes_total=1, final_exported=True, pushes_total=3)
        assert waits(scrapes_total=1, pushes_total=3, final_pushed=True)
        assert not waits(scrapes_total=1, final_exported=True, pushes_total=3, final_pushed=True)
