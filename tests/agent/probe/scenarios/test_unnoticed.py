"""What a program could notice of its node agent: a child, a signal, a wait at its end."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mp_agent.probe import ring_connection
from mp_agent.probe.attachment import Attachment
from mp_agent.probe.processes import node_agent
from mp_agent.probe.processes.exit import ExitHandler, SignalLog
from mp_agent.probe.processes.node_agent import NodeAgentLauncher, start_detached
from mp_agent.records.conditions import ConditionEvent
from mp_agent.ring import locations
from mp_agent.ring.run_files import write_conditions
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.records.samples import make_event
from tests.agent.ring.test_conditions_file import news_of
from tests.waiting import wait_until

pytestmark = pytest.mark.long

_NOTHING = ["json.tool", "--help"]


class TestStartingAProcess:
    def test_leaves_no_child_behind(self):
        """In a separate process: a test runner may have children."""
        program = (
            "import os\n"
            "from mp_agent.probe.processes.node_agent import start_detached\n"
            f"start_detached({_NOTHING!r}, os.environ)\n"
            "try:\n"
            "    print(os.wait())\n"
            "except ChildProcessError:\n"
            "    print('no child')\n"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert ran.stdout.splitlines()[-1:] == ["no child"], ran.stderr

    def test_calls_no_handler_for_sigchld_unless_another_child_has_ended(self):
        called = []
        before = signal.signal(signal.SIGCHLD, lambda *_: called.append(1))
        try:
            start_detached(_NOTHING, os.environ)
            assert not called
            own = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
            os.waitid(os.P_PID, own, os.WEXITED | os.WNOWAIT)
            called.clear()
            start_detached(_NOTHING, os.environ)
            os.waitpid(own, 0)
        finally:
            handler = signal.signal(signal.SIGCHLD, before)
        assert callable(handler)

    @pytest.mark.slow
    def test_is_tried_again_where_there_are_no_processes_to_be_had(
        self, tmp_path, monkeypatch, caplog
    ):
        def refuse(*_: object) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        started = []
        monkeypatch.setattr(node_agent, "CHECK_INTERVAL_SECONDS", 0.0)
        monkeypatch.setattr(node_agent, "start_node_agent", refuse)
        launcher = NodeAgentLauncher(tmp_path, Settings(dir=tmp_path))
        for _ in range(20):
            launcher.ensure_running()
        assert caplog.text.count("cannot be started yet") == 1
        monkeypatch.setattr(node_agent, "start_node_agent", lambda *_: started.append(1))
        wait_until(lambda: launcher.ensure_running() or started, what="another try")


def test_a_ring_that_cannot_be_made_yet_is_made_later(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ring_connection, "RETRY_SECONDS", 0.0)
    attached = Attachment(Settings(dir=tmp_path, node_agent="none", run="r"), setting_errors=0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    attached.begin(None, None)
    try:
        with monkeypatch.context() as short:
            short.setattr(RingWriter, "create", refuse)
            weight.sum().backward()
            optimizer.step()
        assert not attached.connected
        weight.sum().backward()
        optimizer.step()
        assert attached.connected
    finally:
        attached.shutdown()


def test_conditions_are_looked_for_once_a_second(tmp_path, monkeypatch):
    now = [100.0]
    received: list[ConditionEvent] = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    attached = Attachment(
        Settings(dir=tmp_path, node_agent="none", run="r"),
        setting_errors=0,
        callbacks=[received.append],
    )
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    attached.begin(None, None)

    def step() -> None:
        weight.sum().backward()
        optimizer.step()

    try:
        step()
        write_conditions(locations.run_directory(tmp_path, "r"), news_of(make_event()))
        now[0] += 0.9
        step()
        assert received == []
        now[0] += 0.2
        step()
        assert len(received) == 1
    finally:
        attached.shutdown()


def test_sys_exit_is_pickled_by_its_name():
    before = sys.exit
    watch = ExitHandler(lambda reason: None)
    watch.install()
    try:
        assert sys.exit is not before
        assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
        process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
        process.start()
        process.join()
    finally:
        watch.remove()
    assert process.exitcode == 3
    assert sys.exit is before


class TestSignals:
    @pytest.fixture
    def log(self):
        log = SignalLog()
        log.arm()
        yield log
        log.disarm()

    @pytest.mark.parametrize(
        ("number", "asked"),
        [
            (signal.SIGTERM, True),
            (signal.SIGINT, True),
            (signal.SIGHUP, True),
            (signal.SIGUSR1, True),
            (signal.SIGALRM, False),
            (signal.SIGCHLD, False),
        ],
    )
    def test_are_noted_and_their_handlers_left_alone(self, log, number, asked):
        called = []
        handler = lambda number, frame: called.append(number)  # noqa: E731
        before = signal.signal(number, handler)
        try:
            assert not log.asked_to_end
            assert signal.getsignal(number) is handler
            os.kill(os.getpid(), number)
        finally:
            signal.signal(number, before)
        assert called == [number]
        assert log.asked_to_end is asked

    def test_of_a_forked_child_are_its_own(self, log):
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            os.waitpid(child, 0)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert not log.asked_to_end

    def test_descriptor_is_lent_to_any_caller_that_asks_for_it(self, log):
        reading, writing = os.pipe2(os.O_NONBLOCK)
        assert signal.set_wakeup_fd(writing) == -1
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            assert os.read(reading, 8) == bytes([signal.SIGTERM])
            assert log.asked_to_end, "it cannot know, and there is a handler"
            assert signal.set_wakeup_fd(-1) == writing
            assert not log.asked_to_end
            os.kill(os.getpid(), signal.SIGTERM)
            assert log.asked_to_end
        finally:
            signal.signal(signal.SIGTERM, before)
            os.close(reading)
            os.close(writing)

    def test_are_left_to_the_first_user_of_the_descriptor(self):
        reading, writing = os.pipe2(os.O_NONBLOCK)
        real = signal.set_wakeup_fd
        real(writing)
        log = SignalLog()
        log.arm()
        assert real(-1) == writing
        log.disarm()
        os.close(reading)
        os.close(writing)

    def test_cannot_be_noted_from_another_thread_and_that_is_harmless(self):
        log = SignalLog()
        thread = threading.Thread(target=log.arm)
        thread.start()
        thread.join()
        log.poll()
        assert not log.asked_to_end


_STOPPED = """
import os, signal, sys, time, urllib.request
from pathlib import Path
import torch, mp_agent
from mp_agent.records.conditions import ConditionEvent
from mp_agent.ring import locations
from mp_agent.ring.run_files import write_conditions

directory = Path(sys.argv[1])
mp_agent.init(run="stopped", dir=directory, log_dir=directory, port=0, bind="127.0.0.1",
              linger_seconds=3600, exit_wait_seconds=3600)
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
stopping = False
def stop(number, frame):
    global stopping
    stopping = True
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGCHLD, lambda *_: print("a child", flush=True))
scraped = False
while not stopping:
    weight.sum().backward()
    optimizer.step()
    status = locations.read_status(locations.run_directory(directory, "stopped"))
    if status and status.port and not scraped:
        urllib.request.urlopen(f"{status.url}/metrics").read()
    if status and status.scrapes_total and not scraped:
        scraped = True
        print("scraped", flush=True)
    time.sleep(0.01)
sys.exit(0)
"""


@pytest.mark.slow
def test_a_program_that_saves_after_a_signal_to_stop_waits_for_no_scrape(tmp_path):
    """The handler only sets a flag; without the signal it would wait for an hour."""
    command = [sys.executable, "-c", _STOPPED, str(tmp_path)]
    run_dir = locations.run_directory(tmp_path, "stopped")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "scraped\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            if (status := locations.read_status(run_dir)) is not None:
                os.kill(status.pid, signal.SIGKILL)
        assert process.stdout.read() == ""
    wait_until(lambda: not locations.agent_running(run_dir), seconds=120, what="the agent's end")


_DATA = """
import sys, torch, mp_agent
mp_agent.init(node_agent="none", run="workers", dir=sys.argv[1])
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        weight = torch.nn.Parameter(torch.ones(2))
        weight.sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
        return index
if __name__ == "__main__":
    # Before the first backward of the trainer itself.
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=sys.argv[2])
    assert len(list(loader)) == 4
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_worker_that_trains_is_no_rank(tmp_path: Path, method):
    script = tmp_path / "train.py"
    script.write_text(_DATA)
    subprocess.run([sys.executable, str(script), str(tmp_path / "shm"), method], check=True)
    run_dir = locations.run_directory(tmp_path / "shm", "workers")
    assert len(locations.find_rings(run_dir)) == 1
