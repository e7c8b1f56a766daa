import json
import os
from pathlib import Path

import pytest

from mp_agent.node.export.service_discovery import (
    STALE_SECONDS,
    Target,
    TargetsFile,
    render_targets,
)


def target(**changes) -> Target:
    facts = {"url": "http://10.0.0.2:9464", "run": "llama", "attempt": 2, "node_rank": 1}
    return Target(**{**facts, "host": "node1", **changes})


def test_each_agent_is_a_group_with_meta_labels_alone():
    (group,) = json.loads(render_targets([target()]))
    assert group["targets"] == ["10.0.0.2:9464"]
    assert group["labels"] == {
        "__meta_mp_agent_run": "llama",
        "__meta_mp_agent_attempt": "2",
        "__meta_mp_agent_node_rank": "1",
        "__meta_mp_agent_host": "node1",
    }


def test_https_and_ipv6_come_through():
    (group,) = json.loads(render_targets([target(url="https://[fd00::2]:443")]))
    assert group["targets"] == ["[fd00::2]:443"]
    assert group["labels"]["__scheme__"] == "https"


def test_no_agent_is_an_empty_list():
    assert json.loads(render_targets([])) == []


@pytest.mark.parametrize("run", ["llama", "../../etc/passwd", "a/b\0c", "x" * 500, ""])
def test_a_file_lies_in_its_directory_whatever_the_run_is_called(tmp_path: Path, run: str):
    file = TargetsFile(tmp_path, run, "node0-9464")
    file.write(b"[]\n")
    assert file.path.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]
    assert file.path.stat().st_mode & 0o777 == 0o644


def test_two_roots_of_a_run_have_files_of_their_own(tmp_path: Path):
    one, other = (TargetsFile(tmp_path, "llama", root) for root in ("node0-9464", "node1-9464"))
    assert one.path != other.path


def test_readers_see_the_old_or_the_new_file_and_never_a_part(tmp_path: Path):
    file = TargetsFile(tmp_path, "llama", "node0")
    file.write(b"[1]")
    with file.path.open("rb") as reader:
        file.write(b"[2]")
        assert reader.read() == b"[1]"
    assert file.path.read_bytes() == b"[2]"


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    file = TargetsFile(tmp_path, "llama", "node0")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        file.write(b"[]")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_stays_as_it_is_is_only_refreshed(tmp_path: Path):
    file = TargetsFile(tmp_path, "llama", "node0")
    file.write(b"[]")
    before = file.path.stat()
    os.utime(file.path, (1, 1))
    file.write(b"[]")
    after = file.path.stat()
    assert after.st_ino == before.st_ino
    assert after.st_mtime > 1


def test_a_file_that_was_removed_is_written_again(tmp_path: Path):
    file = TargetsFile(tmp_path, "llama", "node0")
    file.write(b"[]")
    file.path.unlink()
    file.write(b"[]")
    assert file.path.read_bytes() == b"[]"


def test_files_of_dead_roots_go_and_those_of_others_stay(tmp_path: Path):
    dead, lively = (TargetsFile(tmp_path, "gpt", root) for root in ("node7", "node8"))
    foreign = tmp_path / "node_exporter.json"
    for path in (dead.path, lively.path, foreign):
        path.write_text("[]")
    own = TargetsFile(tmp_path, "llama", "node0")
    own.write(b"[]")
    now = own.path.stat().st_mtime
    for path, age in ((dead.path, 60), (foreign, 60), (lively.path, -60)):
        os.utime(path, (now, now - STALE_SECONDS - age))
    assert own.remove_stale() == [dead.path]
    assert {path.name for path in tmp_path.iterdir()} == {
        own.path.name,
        lively.path.name,
        foreign.name,
    }


def test_stale_files_of_other_users_stay_and_stop_nothing(tmp_path: Path, monkeypatch):
    own, *dead = (TargetsFile(tmp_path, "run", root) for root in ("own", "foreign", "mine"))
    for file in (own, *dead):
        file.write(b"[]")
    for file in dead:
        os.utime(file.path, (1.0, 1.0))
    unlink = Path.unlink

    def as_in_a_sticky_directory(path: Path, missing_ok: bool = False) -> None:
        if path == dead[0].path:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", as_in_a_sticky_directory)
    assert own.remove_stale() == [dead[1].path]
