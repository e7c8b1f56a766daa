import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mp_agent.ring.run_files import RootNote, read_root_note, root_note_path, write_root_note

NOTE = RootNote(asked_by_unix_ns=1, created_unix_ns=2, url="http://10.0.0.1:9464", token="secret")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_note_is_read_as_it_was_written_and_readable_by_its_owner_alone(run_dir: Path):
    write_root_note(run_dir, NOTE)
    assert read_root_note(run_dir) == NOTE
    assert root_note_path(run_dir).stat().st_mode & 0o777 == 0o600


def test_a_note_has_room_for_thousands_of_nodes(run_dir: Path):
    nodes = {
        str(number): f"http://node-{number}.cluster.example.com:9464" for number in range(4096)
    }
    note = replace(NOTE, nodes=nodes)
    write_root_note(run_dir, note)
    assert read_root_note(run_dir) == note


def test_no_note_is_none(run_dir: Path):
    assert read_root_note(run_dir) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"asked_by_unix_ns": 1, "unknown": 2}',
        b"\xff\xfe",
        json.dumps({"asked_by_unix_ns": 1, "url": "file:///etc/passwd"}).encode(),
        json.dumps({"asked_by_unix_ns": 1, "url": "http://user@host"}).encode(),
        json.dumps({"asked_by_unix_ns": 1, "url": "http://host\r\nX: y"}).encode(),
        json.dumps({"asked_by_unix_ns": 1, "url": 3}).encode(),
        json.dumps({"asked_by_unix_ns": 1, "nodes": ["http://10.0.0.2:9464"]}).encode(),
        json.dumps({"asked_by_unix_ns": 1, "nodes": {"1": "file:///etc/passwd"}}).encode(),
    ],
)
def test_what_is_no_note_is_none(run_dir: Path, content: bytes):
    root_note_path(run_dir).write_bytes(content)
    assert read_root_note(run_dir) is None


def test_a_link_in_its_place_is_not_followed(run_dir: Path, tmp_path: Path):
    write_root_note(run_dir, NOTE)
    root_note_path(run_dir).rename(run_dir / "elsewhere")
    os.symlink(run_dir / "elsewhere", root_note_path(run_dir))
    assert read_root_note(run_dir) is None


def test_the_token_is_not_shown():
    assert "secret" not in repr(NOTE)
