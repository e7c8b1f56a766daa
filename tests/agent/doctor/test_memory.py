"""The doctor reports what keeps ranks from writing their rings."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mp_agent.doctor.machine import CheckStatus, Machine
from mp_agent.settings import Settings
from tests.agent.doctor.conftest import found, only, verdicts
from tests.agent.node.conftest import StartRank


@pytest.fixture
def in_memory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def at(path: Path) -> Machine:
    return Machine(Settings(dir=path))


def texts(machine: Machine, verdict: CheckStatus) -> str:
    wanted = (one for one in found("shared-memory", machine) if one.verdict is verdict)
    return "; ".join(one.text for one in wanted)


def test_a_private_directory_on_tmpfs_is_fine(in_memory: Path) -> None:
    assert verdicts("shared-memory", at(in_memory)) == {CheckStatus.OK}


def test_a_directory_that_is_not_there_is_not_known(tmp_path: Path) -> None:
    assert CheckStatus.UNKNOWN in verdicts("shared-memory", at(tmp_path / "none"))


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    path.touch() if kind == "file" else path.symlink_to(tmp_path)
    assert "no directory" in texts(at(path), CheckStatus.WRONG)


def test_rings_that_were_removed_under_a_process_are_reported(
    start_rank: StartRank, settings: Settings
) -> None:
    rank = start_rank()
    assert only("removed-rings", Machine(settings)).verdict is CheckStatus.OK
    shutil.rmtree(settings.dir)
    finding = only("removed-rings", Machine(settings))
    assert finding.verdict is CheckStatus.WRONG
    assert finding.text.endswith(f"pid {rank.pid}")
    assert "RemoveIPC" in finding.remedy


def test_a_directory_of_another_user_is_reported(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = in_memory.stat().st_uid
    if owner == 0:
        os.chown(in_memory, 4711, -1)
        owner = 4711
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to uid {owner}" in texts(at(in_memory), CheckStatus.WRONG)


def test_a_directory_that_everyone_can_write_is_reported(in_memory: Path) -> None:
    in_memory.chmod(0o777)
    assert "everybody" in texts(at(in_memory), CheckStatus.WRONG)


def test_a_directory_that_cannot_be_written_is_reported(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory.chmod(0o500)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot write" in texts(at(in_memory), CheckStatus.WRONG)


def test_a_directory_on_a_disk_is_reported(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = in_memory / "mounts"
    mounts.write_text(f"shm /dev/shm tmpfs rw 0 0\n/dev/sda1 {in_memory} ext4 rw 0 0\n")
    monkeypatch.setattr("mp_agent.doctor.runs._MOUNTS", mounts)
    assert "ext4" in texts(at(in_memory), CheckStatus.WRONG)
    assert verdicts("shared-memory", at(in_memory.parent)) & {CheckStatus.OK}


def test_too_little_space_is_reported(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    assert f"{in_memory} has 4 KiB free" in texts(at(in_memory), CheckStatus.WRONG)


def test_too_little_space_is_reported_before_a_job_has_made_the_directory(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    machine = at(in_memory / "not" / "there")
    assert f"{in_memory} has 4 KiB free" in texts(machine, CheckStatus.WRONG)
