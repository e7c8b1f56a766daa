"""Each case runs a real interpreter to its end and looks at what it left behind."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mp_agent.node.collect.rank_source import rank_end
from mp_agent.probe.processes.exit import wait_for_export
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from tests.subtests import each

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def interpreters_end_as_those_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other tests leave out the last collection (Makefile)."""
    monkeypatch.delenv("PYTEST_VERSION")


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


def _reader(directory: Path, run: str = "exit-test") -> RingReader:
    (path,) = locations.find_rings(locations.run_directory(directory, run))
    return RingReader.open(path)


def _end(directory: Path, run: str = "exit-test") -> EndReason:
    """Return the end of the only rank of a run, as a node agent sees it."""
    reader = _reader(directory, run)
    try:
        assert not reader.writer_alive()
        return rank_end(reader.state, alive=False, exit_status=reader.exit_status)
    finally:
        reader.close()


COMPLETED, FAILED, KILLED = EndReason.COMPLETED, EndReason.FAILED, EndReason.KILLED
_HANDLER = """
def stop(number, frame):
    step()
    {}
signal.signal(signal.SIGTERM, stop)
os.kill(os.getpid(), signal.SIGTERM)
"""


_ENDINGS: list[tuple[str, EndReason, int]] = [
    ("", COMPLETED, 0),
    ("mp_agent.shutdown()", COMPLETED, 0),
    ("mp_agent.shutdown(); sys.exit(3)", COMPLETED, 3),
    ("sys.exit(0)", COMPLETED, 0),
    ("sys.exit()", COMPLETED, 0),
    ("sys.exit(False)", COMPLETED, 0),
    ("sys.exit(256)", COMPLETED, 0),
    ("sys.exit(3)", FAILED, 3),
    ("sys.exit(-1)", FAILED, 255),
    ("sys.exit('')", FAILED, 1),
    ("sys.exit('broken data')", FAILED, 1),
    ("raise SystemExit", COMPLETED, 0),
    ("raise SystemExit(0)", COMPLETED, 0),
    ("raise SystemExit(1)", FAILED, 1),
    ("raise SystemExit('text')", FAILED, 1),
    ("exit(2)", FAILED, 2),
    ("quit()", COMPLETED, 0),
    ("raise RuntimeError('bad batch')", FAILED, 1),
    ("raise KeyboardInterrupt", FAILED, -2),
    ("os.kill(os.getpid(), signal.SIGINT); step()", FAILED, -2),
    ("os.kill(os.getpid(), signal.SIGKILL)", KILLED, -9),
    ("os.kill(os.getpid(), signal.SIGTERM)", KILLED, -15),
    ("os.abort()", KILLED, -6),
    ("os._exit(0)", KILLED, 0),
    (_HANDLER.format("sys.exit(0)"), COMPLETED, 0),
    (_HANDLER.format("sys.exit(9)"), FAILED, 9),
    (_HANDLER.format("raise SystemExit(9)"), FAILED, 9),
    (_HANDLER.format("pass") + "\nstep()", COMPLETED, 0),
    (
        """
try:
    sys.exit(1)
except SystemExit:
    step()
""",
        COMPLETED,
        0,
    ),
    (
        """
try:
    sys.exit(0)
except SystemExit:
    raise SystemExit(5)
""",
        FAILED,
        5,
    ),
    (
        """
sys.excepthook(ValueError, ValueError("reported, and gone on"), None)
""",
        COMPLETED,
        0,
    ),
    (
        """
import threading
for target in (lambda: sys.exit(4), lambda: 1 / 0):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
""",
        COMPLETED,
        0,
    ),
    ("import atexit; atexit.register(lambda: 1 / 0)", COMPLETED, 0),
    ("import atexit; atexit.register(sys.exit, 6)", COMPLETED, 0),
    (
        """
if os.fork() == 0:
    sys.exit(7)
os.wait()
""",
        COMPLETED,
        0,
    ),
    (
        """
if os.fork() == 0:
    raise SystemExit(7)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
""",
        KILLED,
        -9,
    ),
]

# Every case is a fork, so that torch is imported once, and its objects are not searched. It
# leaves this module's frame like any other program does.
_ENDS = """
import gc, json, os, signal, sys, torch, mp_agent
torch.set_num_threads(1)
directory, cases, codes = sys.argv[1], json.loads(sys.argv[2]), []
def step():
    (weight * 2).sum().backward()
    optimizer.step()
def begin(name):
    global weight, optimizer
    mp_agent.init(node_agent="none", run=name, dir=directory)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    step()
begin("what is imported only now, is imported once")
mp_agent.shutdown()
gc.freeze()
for name, body in cases.items():
    pid = os.fork()
    if pid == 0:
        begin(name)
        exec(body)
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    print(json.dumps(codes))
"""


def _run_forked(bodies: Mapping[str, str], directory: Path) -> list[int]:
    """Run each body as a run of that name; return their exit codes."""
    command = [sys.executable, "-c", _ENDS, str(directory), json.dumps(bodies)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    codes: list[int] = json.loads(result.stdout.splitlines()[-1])
    return codes


@pytest.mark.slow
def test_a_node_agent_knows_how_a_process_ended(tmp_path):
    bodies = {f"case-{number}": body for number, (body, _, _) in enumerate(_ENDINGS)}
    codes = _run_forked(bodies, tmp_path)
    seen = [
        (body, _end(tmp_path, name), code)
        for (name, body), code in zip(bodies.items(), codes, strict=True)
    ]
    assert seen == _ENDINGS


_TRAINER = """
import multiprocessing, os, signal, sys, threading
import torch, mp_agent

def train(method, ending):
    mp_agent.init(node_agent="none", run=f"{method}-{ending}", dir=sys.argv[1])
    weight = torch.nn.Parameter(torch.ones(3))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGTERM)
    if ending == "raise":
        raise ValueError("bad batch")
    if ending == "thread":
        thread = threading.Thread(target=sys.exit, args=(4,))
        thread.start()
        thread.join()
    if ending == "text":
        sys.exit("no data")
    if ending == "none":
        raise SystemExit(None)

if __name__ == "__main__":
    torch.set_num_threads(1)
    import mp_agent.probe.api, torch._dynamo  # once for all that are forked
    multiprocessing.set_forkserver_preload(["mp_agent.probe.api", "torch._dynamo"])
    processes = {}
    for case in sys.argv[2:]:
        method, ending = case.split("-")
        context = multiprocessing.get_context(method)
        processes[case] = context.Process(target=train, args=(method, ending))
        processes[case].start()
        processes[case].join()
    print(*(process.exitcode for process in processes.values()))
"""
_CHILD_ENDINGS = {
    "return": (COMPLETED, 0),
    "none": (COMPLETED, 0),
    "text": (FAILED, 1),
    "raise": (FAILED, 1),
    "thread": (COMPLETED, 0),
    "kill": (KILLED, -15),
}


@pytest.mark.slow
def test_a_child_of_multiprocessing_ends_as_its_exit_code_says(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_TRAINER)
    expected = {
        f"{method}-{ending}": end
        for method, endings in (
            ("fork", _CHILD_ENDINGS),
            ("forkserver", _CHILD_ENDINGS),
            ("spawn", ("none", "text")),
        )
        for ending, end in _CHILD_ENDINGS.items()
        if ending in endings
    }
    command = [sys.executable, str(script), str(tmp_path / "shm"), *expected]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    codes = map(int, result.stdout.splitlines()[-1].split())
    seen = {
        case: (_end(tmp_path / "shm", case), code)
        for case, code in zip(expected, codes, strict=True)
    }
    assert seen == expected


_DIES_IN_STEP = """
class Broken(torch.optim.SGD):
    def step(self, closure=None):
        {}
optimizer.zero_grad()
broken = Broken([weight], lr=0.1)
optimizer.register_step_pre_hook(lambda *_: broken.step())
(weight * 5).sum().backward()
optimizer.step()
"""
_DEATHS = {
    "raise RuntimeError('bad batch')": 1,
    "os.kill(os.getpid(), signal.SIGTERM)": -15,
    "os.kill(os.getpid(), signal.SIGKILL)": -9,
}


@pytest.mark.slow
def test_the_step_under_way_at_a_crash_reaches_the_ring(tmp_path):
    """The optimizer dies after the gradients were measured: they are in the open record."""
    bodies = {f"death{code}": _DIES_IN_STEP.format(death) for death, code in _DEATHS.items()}
    assert _run_forked(bodies, tmp_path) == [*_DEATHS.values()]
    for name in bodies:
        reader = _reader(tmp_path, name)
        schema = reader.schema
        assert schema is not None, name
        complete, _ = reader.steps_after(0)
        record = reader.open_record()
        assert [step.sequence for step in complete] == [1], name
        assert record is not None and record.sequence == 2, name
        squares = record.gradients[0][schema.columns("gradients").index("sum_squares")]
        assert squares == pytest.approx(3 * 5.0**2), name
        reader.close()


@pytest.mark.slow
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
    assert _end(tmp_path) is FAILED


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "mp_agent.shutdown()", "sys.exit(5)"])
def test_a_program_that_closes_all_descriptors_keeps_its_own_files(tmp_path, end):
    """It opens files under the numbers that mp_agent had, as a daemon does."""
    result = _run(
        f"""
        import time
        os.closerange(3, 1000)
        names = [f"{tmp_path}/own{{number}}" for number in range(40)]
        files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in names]
        assert all(os.pwrite(fd, b"own", 0) for fd in files)
        time.sleep(1.1)
        step()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGUSR1)
        torch.optim.SGD([weight, torch.nn.Parameter(torch.ones(99))], lr=0.1).step()
        {end}
        assert all(os.lseek(fd, 0, os.SEEK_CUR) == 0 for fd in files)
        """,
        tmp_path / "rings",
    )
    assert (result.returncode, "unwatched" in result.stderr) == (5 * ("5" in end), True)
    assert "Traceback" not in result.stderr, result.stderr
    assert {path.read_bytes() for path in tmp_path.glob("own*")} == {b"own"}


@pytest.mark.slow
@each(("length", "end"), [(0, ""), (0, "sys.exit(5)"), (100, ""), (5000, "mp_agent.shutdown()")])
def test_a_ring_that_another_process_truncates_does_not_end_the_program(tmp_path, length, end):
    tmp_path /= f"{length}{end}"
    result = _run(
        f"""
        import time
        from pathlib import Path
        from mp_agent.ring import locations
        for run in locations.find_runs(Path({str(tmp_path)!r})):
            for ring in locations.find_rings(run):
                os.truncate(ring, {length})
        if {length}:
            step()
            time.sleep(1.1)
            step()
            torch.optim.SGD([weight, torch.nn.Parameter(torch.ones(99))], lr=0.1).step()
        {end}
        """,
        tmp_path,
    )
    assert result.returncode == 5 * ("5" in end), result.stderr
    assert ("unwatched" in result.stderr, "Traceback" in result.stderr) == (length > 0, False)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_program_that_becomes_another_user_ends_without_a_traceback(tmp_path):
    again = f"init(run='exit-test', dir={str(tmp_path)!r}, port=0, linger_seconds=0)"
    result = _run(f"mp_agent.shutdown(); mp_agent.{again}; step(); os.setuid(65534)", tmp_path)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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

        class Writer(RingWriter):
            def __init__(self) -> None:
                pass

            def wait_for_export(self, waiting: bool) -> None:
                pass

        def waits(**changes: Any) -> bool:
            shown: dict[str, Any] = {"scrapes_total": 0, "final_exported": False, **changes}
            status = locations.AgentStatus(
                pid=1,
                host="host",
                port=1,
                url="",
                started_unix_ns=0,
                **shown,
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
