"""Nodes that meet at the job's own store: with a store made here, and with torch's real one."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mp_agent.probe.processes import node_agent, rendezvous
from mp_agent.probe.processes.node_agent import searches_root, start_rendezvous
from mp_agent.probe.processes.rendezvous import Rendezvous
from mp_agent.ring import locations
from mp_agent.ring.locations import AgentStatus
from mp_agent.ring.reader import RingReader
from mp_agent.ring.run_files import RootNote, read_root_note, write_root_note
from mp_agent.settings import Settings
from tests.agent.node.builders import make_identity
from tests.agent.node.fake_rank import FakeRank
from tests.waiting import wait_until

KEY = "mp_agent/root/llama"
URL = "http://10.0.0.1:9464"


class DictStore:
    """A store that never fails."""

    def __init__(self, **values: str) -> None:
        self.values = values

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def answer(created_unix_ns: int = 77, **changes: Any) -> str:
    facts = {"attempt": 0, "created_unix_ns": created_unix_ns, "url": URL, "token": "secret"}
    return json.dumps({**facts, **changes})


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MP_AGENT_TOKEN", raising=False)
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS_MAX", 0.01)
    monkeypatch.setattr(rendezvous, "LIFE_SECONDS", 20.0)
    monkeypatch.setattr(rendezvous, "FOLLOW_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        yield


@pytest.fixture
def start_rank(tmp_path: Path) -> Iterator[Callable[..., FakeRank]]:
    with ExitStack() as stack:

        def start(rank: int, base: str = "shm") -> FakeRank:
            run_dir = locations.run_directory(tmp_path / base, "llama")
            fake = FakeRank(run_dir, rank, world_size=4, local_world_size=2, node_rank=rank // 2)
            return stack.enter_context(fake)

        yield start


@pytest.fixture
def serving_agent(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Return what makes it look as if a node agent served in a run directory."""
    with ExitStack() as stack:

        def serve(run_dir: Path) -> None:
            script = (
                "import sys, pathlib, time\n"
                "from mp_agent.ring.locations import hold_agent_lock\n"
                "fd = hold_agent_lock(pathlib.Path(sys.argv[1]))\n"
                "print(fd, flush=True)\n"
                "sys.stdin.read()\n"
            )
            holder = subprocess.Popen(
                [sys.executable, "-c", script, str(run_dir)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.enter_context(holder)  # closes the pipes
            stack.callback(holder.kill)
            assert holder.stdout is not None
            assert holder.stdout.readline().strip().isdigit()
            status = AgentStatus(
                pid=holder.pid,
                host="host",
                port=9999,
                url="http://127.0.0.1:9999",
                scrapes_total=0,
                final_exported=False,
                started_unix_ns=0,
            )
            locations.write_status(run_dir, status)

        yield serve


def run_dir_of(rank: FakeRank) -> Path:
    return rank.path.parent.parent


def meet(rank: FakeRank, store: Any, connect: Any = None) -> RootNote | None:
    reader = RingReader.open(rank.path)
    Rendezvous(reader, connect or (lambda host, port: store)).meet()
    return read_root_note(run_dir_of(rank))


def test_rank_0_hands_out_where_its_agent_is_and_a_fresh_token(start_rank, serving_agent):
    store, rank = DictStore(), start_rank(0)
    serving_agent(run_dir_of(rank))
    note = meet(rank, store)
    assert note is not None
    assert note.url == "http://127.0.0.1:9999"
    assert note.created_unix_ns == note.asked_by_unix_ns == rank.identity.created_unix_ns
    assert len(note.token) >= 32
    assert json.loads(store.values[KEY])["token"] == note.token
    again = meet(rank, store)
    assert again is not None
    assert again.token != note.token


def test_a_token_that_was_set_is_not_given_to_the_store(start_rank, serving_agent, monkeypatch):
    monkeypatch.setenv("MP_AGENT_TOKEN", "long-lived")
    store, rank = DictStore(), start_rank(0)
    serving_agent(run_dir_of(rank))
    note = meet(rank, store)
    assert note is not None
    assert note.token == ""
    assert "long-lived" not in str(store.values)


def test_the_address_that_was_set_for_the_agent_is_handed_out(start_rank, serving_agent):
    store, rank = DictStore(), start_rank(0)
    serving_agent(run_dir_of(rank))
    status = locations.read_status(run_dir_of(rank))
    assert status is not None
    changed = AgentStatus(
        **{**{n: getattr(status, n) for n in status.__slots__}, "advertise": "head.cluster"}
    )
    locations.write_status(run_dir_of(rank), changed)
    note = meet(rank, store)
    assert note is not None
    assert note.url == "http://head.cluster:9999"


def test_another_node_learns_it_and_keeps_it_to_itself(start_rank):
    rank = start_rank(2)
    note = meet(rank, DictStore(**{KEY: answer()}))
    assert note == RootNote(
        asked_by_unix_ns=rank.identity.created_unix_ns,
        created_unix_ns=77,
        url=URL,
        token="secret",
        address="127.0.0.1",
    )
    assert (run_dir_of(rank) / "root.json").stat().st_mode & 0o077 == 0


def test_the_answer_of_the_attempt_before_does_not_count(start_rank):
    rank, store = start_rank(2), DictStore(**{KEY: answer(77)})
    write_root_note(run_dir_of(rank), RootNote(asked_by_unix_ns=1, created_unix_ns=77, url=URL))
    later = threading.Timer(0.3, store.set, (KEY, answer(78, url="http://10.0.0.2:9464")))
    later.start()
    note = meet(rank, store)
    later.join()
    assert note is not None
    assert (note.created_unix_ns, note.url) == (78, "http://10.0.0.2:9464")


def test_a_newcomer_that_got_the_old_answer_takes_the_new_one_up(start_rank, monkeypatch):
    monkeypatch.setattr(rendezvous, "FOLLOW_SECONDS", 1.0)
    rank, store = start_rank(2), DictStore(**{KEY: answer(77)})
    threading.Timer(0.3, store.set, (KEY, answer(78))).start()
    note = meet(rank, store)
    assert note is not None
    assert note.created_unix_ns == 78
    assert note.problem == ""


@pytest.mark.parametrize(
    "value", ["", "{", "[]", '{"url": 3}', answer(url="file:///etc/passwd"), answer(url="")]
)
def test_an_answer_that_cannot_be_used_is_a_problem_that_is_noted(start_rank, value):
    note = meet(start_rank(2), DictStore(**{KEY: value}))
    assert note is not None
    assert note.problem
    assert note.token == ""
    assert note.url == "http://127.0.0.1:9464", "what may be tried without the store"


def test_a_store_that_fails_is_a_problem_that_is_noted(start_rank):
    class Broken(DictStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    note = meet(start_rank(2), Broken())
    assert note is not None
    assert note.problem == "connection reset"


def test_without_a_store_it_gives_up_in_time(start_rank, monkeypatch):
    def refuse(host: str, port: int) -> DictStore:
        raise RuntimeError("refused")

    monkeypatch.setattr(rendezvous, "LIFE_SECONDS", 0.2)
    note = meet(start_rank(2), None, refuse)
    assert note is not None
    assert "no store answers at 127.0.0.1" in note.problem
    monkeypatch.delenv("MASTER_PORT")
    note = meet(start_rank(2, "other"), DictStore())
    assert note is not None
    assert "MASTER_PORT" in note.problem


def test_it_does_not_knock_at_a_free_port_of_its_own_machine(start_rank, monkeypatch):
    """Its own knocking could take the port that rank 0 is about to listen on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(rendezvous, "LIFE_SECONDS", 0.3)
    knocks = []

    def connect(host: str, port: int) -> DictStore:
        knocks.append(port)
        return DictStore(**{KEY: answer()})

    note = meet(start_rank(2), None, connect)
    assert note is not None
    assert note.problem
    assert knocks == []
    with socket.create_server(("127.0.0.1", port)):
        note = meet(start_rank(3), None, connect)
    assert note is not None
    assert (note.url, knocks) == (URL, [port])


def test_it_ends_when_the_rank_is_gone_and_writes_nothing_then(start_rank):
    rank = start_rank(2)
    reader = RingReader.open(rank.path)
    rank.kill()
    Rendezvous(reader, lambda host, port: DictStore()).meet()
    assert read_root_note(run_dir_of(rank)) is None


@pytest.mark.slow
def test_two_nodes_meet_at_torchs_own_store(start_rank, serving_agent, monkeypatch, tmp_path):
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not on all platforms

    first, second = start_rank(0, "first"), start_rank(2, "second")
    serving_agent(run_dir_of(first))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    settings = Settings(dir=tmp_path)
    starters = [start_rendezvous(rank.path, settings) for rank in (second, first)]
    assert [starter.wait(30) for starter in starters] == [0, 0], "no search waits for them"
    assert read_root_note(run_dir_of(second)) is None
    store = TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=5))
    notes = [
        wait_until(lambda: read_root_note(run_dir_of(rank)), seconds=60, what="a note")  # noqa: B023
        for rank in (first, second)
    ]
    assert notes[0].url == notes[1].url == "http://127.0.0.1:9999"
    assert notes[0].token == notes[1].token
    assert store.check([KEY])
    for process in rendezvous_processes(tmp_path):
        assert notes[0].token not in process


def rendezvous_processes(directory: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "mp_agent.probe.processes.rendezvous" in line and str(directory) in line:
                found.append(line)
    return found


@pytest.mark.parametrize(
    ("note", "searches"),
    [
        (None, 2),
        ({"problem": "no store answers", "url": "http://10.0.0.1:9464"}, 2),
        ({"created_unix_ns": 77, "url": URL}, 1),
    ],
)
def test_a_search_without_an_answer_is_repeated_once_when_steps_are_made(
    tmp_path, monkeypatch, note, searches
):
    """`srun python train.py` that loads data for longer than a search before it makes its group."""
    begun = []
    monkeypatch.setattr(node_agent, "LIFE_SECONDS", 0.0)
    monkeypatch.setattr(node_agent, "start_rendezvous", lambda *arguments: begun.append(arguments))
    search = node_agent.RootSearch(tmp_path / "launch-0" / "rank0.ring", Settings(dir=tmp_path))
    search.begin()
    if note is not None:
        write_root_note(tmp_path, RootNote(asked_by_unix_ns=1, **note))
    for _ in range(3):
        search.retry_if_due()
    assert len(begun) == searches


@pytest.mark.parametrize(
    ("identity", "settings", "meets"),
    [
        ({"rank": 0, "world_size": 2}, {}, False),
        ({"rank": 0, "world_size": 4, "local_world_size": 2}, {}, True),
        ({"rank": 2, "local_rank": 0, "world_size": 4, "local_world_size": 2}, {}, True),
        ({"rank": 3, "local_rank": 1, "world_size": 4, "local_world_size": 2}, {}, False),
        ({"rank": 0, "local_rank": 1, "world_size": 4, "local_world_size": 2}, {}, True),
        ({"rank": 0, "world_size": 4, "local_world_size": 2}, {"node_agent": "none"}, False),
        ({"rank": 0, "world_size": 4, "local_world_size": 2}, {"node_agent": "external"}, True),
        ({"rank": 0, "world_size": 4, "local_world_size": 2}, {"root": "head"}, True),
        (
            {"rank": 0, "world_size": 4, "local_world_size": 2},
            {"root": "head", "token": "secret"},
            False,
        ),
    ],
)
def test_a_run_of_one_node_asks_no_store(identity, settings, meets):
    assert searches_root(make_identity(**identity), Settings(**settings)) is meets


@pytest.mark.slow
def test_the_process_yields_to_training(start_rank, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    rank = start_rank(2)
    starting = start_rendezvous(rank.path, Settings(dir=tmp_path))
    wait_until(lambda: starting.poll() is not None, what="the detached process")
    pids = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_ours(entry, rank.path)
    ]
    try:
        assert len(pids) == 1
        assert os.getpriority(os.PRIO_PROCESS, pids[0]) > os.getpriority(os.PRIO_PROCESS, 0)
        wait_until(lambda: os.getsid(pids[0]) == pids[0], what="a session of its own")
    finally:
        rank.kill()
    wait_until(lambda: not Path(f"/proc/{pids[0]}").exists(), seconds=20, what="its end")


def _is_ours(entry: Path, ring: Path) -> bool:
    try:
        return str(ring).encode() in (entry / "cmdline").read_bytes()
    except OSError:
        return False
