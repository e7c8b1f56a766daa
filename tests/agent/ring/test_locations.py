"""Where files lie, and how rank and node agent meet through the small ones."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_agent.errors import RingError
from mp_agent.ring.locations import (
    AgentStatus,
    agent_lock_path,
    agent_running,
    agent_status_path,
    find_rings,
    find_runs,
    hold_agent_lock,
    ledger_path,
    read_status,
    ring_path,
    run_directory,
    write_status,
)
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.children import child, exit_code_of, kill
from tests.agent.ring.samples import identity
from tests.waiting import wait_until

BASE = Path("/base")
STATUS = AgentStatus(
    pid=1,
    host="häst",
    port=9464,
    url="http://h:9464",
    scrapes_total=3,
    final_exported=False,
    started_unix_ns=5,
)


@given(run=st.text(st.characters(exclude_categories=())), rank=st.integers(0, 10**6))
def test_any_name_gives_a_short_path_inside_the_base(run: str, rank: int) -> None:
    directory = run_directory(BASE, run)
    assert directory.parent == BASE
    path = ring_path(directory, identity(rank=rank, launch=run))
    assert path.parent.parent == directory
    for name in path.relative_to(BASE).parts:
        assert 0 < len(name) < 80 and name.isascii() and not name.startswith(".")


@given(runs=st.lists(st.text(st.characters(exclude_categories=())), unique=True))
def test_two_runs_never_share_a_directory(runs: list[str]) -> None:
    assert len({run_directory(BASE, run) for run in runs}) == len(runs)


def test_launches_attempts_and_ranks_have_rings_of_their_own() -> None:
    identities = [
        identity(launch=launch, attempt=attempt, rank=rank)
        for launch in ("a", "a-1", "a 1")
        for attempt in (0, 1, 11)
        for rank in (0, 1)
    ]
    assert len({ring_path(BASE, each) for each in identities}) == len(identities)


def test_rings_are_found_and_nothing_else(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path, "a run")
    expected = [ring_path(run_dir, identity(rank=rank)) for rank in (0, 2, 10)]
    writers = [RingWriter.create(path, identity()) for path in reversed(expected)]
    for name in ("rank.ring", "rank1.ring.tmp", ".rank1.ring.7", "other"):
        (expected[0].parent / name).touch()
    (run_dir / "linked").symlink_to(expected[0].parent)
    assert find_rings(run_dir) == expected
    (tmp_path / "unrelated").mkdir()
    (tmp_path / "file-0123abcd").touch()
    assert find_runs(tmp_path) == [run_dir]
    for writer in writers:
        writer.close()


def test_absent_directories_hold_nothing(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert find_runs(absent) == find_rings(absent) == []
    assert read_status(absent) is None
    assert not agent_running(absent)


def test_the_files_of_a_run_have_names_of_their_own(tmp_path: Path) -> None:
    paths = {agent_lock_path(tmp_path), agent_status_path(tmp_path), ledger_path(tmp_path)}
    assert len(paths) == 3 and {path.parent for path in paths} == {tmp_path}


def test_a_status_is_read_as_it_was_written_last(tmp_path: Path) -> None:
    for status in (STATUS, replace(STATUS, final_exported=True)):
        write_status(tmp_path, status)
        assert read_status(tmp_path) == status
    assert os.listdir(tmp_path) == [agent_status_path(tmp_path).name]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b'{"pid": 1}', b"\xff", b'"text"'])
def test_a_status_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    agent_status_path(tmp_path).write_bytes(content)
    assert read_status(tmp_path) is None


def test_a_status_of_another_owner_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_status(tmp_path, STATUS)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert read_status(tmp_path) is None


def test_readers_see_one_whole_status_while_it_is_replaced(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)

    def replace_forever() -> None:
        for count in range(10**9):
            write_status(tmp_path, replace(STATUS, scrapes_total=count))

    with child(replace_forever):
        deadline = time.monotonic() + 60.0
        counts: set[int] = set()
        while len(counts) < 200:
            assert time.monotonic() < deadline
            status = read_status(tmp_path)
            assert status is not None and status.url == STATUS.url
            counts.add(status.scrapes_total)


def test_one_process_at_a_time_holds_the_agent_lock(tmp_path: Path) -> None:
    assert not agent_running(tmp_path)
    fd = hold_agent_lock(tmp_path)
    assert fd is not None
    assert agent_running(tmp_path), "also seen by the process that holds it"
    assert hold_agent_lock(tmp_path) is None
    assert exit_code_of(lambda: 1 / 0 if hold_agent_lock(tmp_path) is not None else None) == 0
    assert agent_running(tmp_path), "asking does not end it"
    os.close(fd)
    assert not agent_running(tmp_path)


def test_the_agent_lock_dies_with_its_holder(tmp_path: Path) -> None:
    def hold_forever() -> None:
        hold_agent_lock(tmp_path)
        time.sleep(3600)

    with child(hold_forever) as pid:
        wait_until(lambda: agent_running(tmp_path), what="the child to hold the lock")
        kill(pid)
        assert not agent_running(tmp_path)
    fd = hold_agent_lock(tmp_path)
    assert fd is not None
    os.close(fd)


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real_open, opened = agent_lock_path(tmp_path), os.open, []

    def open_then_lose(*arguments: object) -> int:
        if arguments[0] == os.devnull:
            return real_open(*arguments)  # type: ignore[arg-type]
        opened.append(real_open(*arguments))  # type: ignore[arg-type]
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    monkeypatch.setattr(os, "open", open_then_lose)
    fd = hold_agent_lock(tmp_path)
    assert len(opened) == 2 and fd == opened[-1]
    assert os.path.samestat(os.fstat(fd), path.stat())
    os.close(fd)


def test_a_lock_file_of_another_owner_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_lock_path(tmp_path).touch()
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    with pytest.raises(RingError, match=f"belongs to uid {real}"):
        hold_agent_lock(tmp_path)
    assert not agent_running(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "[" * 60_000,
        '{"pid": 1, "host": "h", "port": 9464}',
        '{"pid": 1, "host": "h", "port": "9464", "url": "u", "scrapes_total": 0, '
        '"final_exported": false, "started_unix_ns": 1}',
        '{"pid": 1, "host": "h", "port": 9464, "url": 7, "scrapes_total": 0, '
        '"final_exported": false, "started_unix_ns": 1}',
        '{"pid": 1, "host": "h", "port": 99999, "url": "u", "scrapes_total": 0, '
        '"final_exported": false, "started_unix_ns": 1}',
    ],
)
def test_a_status_that_is_damaged_or_holds_other_values_is_none(tmp_path, content):
    path = agent_status_path(tmp_path)
    path.write_text(content)
    path.chmod(0o600)
    assert read_status(tmp_path) is None
