"""Shared memory that runs full gives OSError when space is reserved, and never SIGBUS."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mp_agent.ring.files import no_room
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.children import exit_code_of
from tests.agent.ring.samples import identity, same_step, schema, step_record


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MB."""
    directory = tmp_path / "tmpfs"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_tmpfs_makes_no_ring_and_leaves_nothing_behind(small_tmpfs: Path) -> None:
    ring = small_tmpfs / "run" / "launch-0" / "rank0.ring"
    ring.parent.mkdir(parents=True)
    fill(small_tmpfs)
    with pytest.raises(OSError) as refused:
        RingWriter.create(ring, identity())
    assert refused.value.errno == errno.ENOSPC
    assert os.listdir(ring.parent) == []


def test_a_schema_that_does_not_fit_leaves_the_ring_as_it_was(small_tmpfs: Path) -> None:
    path, known = small_tmpfs / "run" / "rank0.ring", schema()

    def rank() -> None:
        writer = RingWriter.create(path, identity())
        writer.write_schema(known)
        with pytest.raises(OSError) as refused:
            writer.write_schema(schema(layers=100_000))
        assert refused.value.errno == errno.ENOSPC
        assert str(refused.value.strerror).startswith(f"{small_tmpfs} is full: ")
        assert " of 2 MiB are free" in str(refused.value.strerror)
        writer.write_step(step_record(known, 1))

    assert exit_code_of(rank) == 0
    reader = RingReader.open(path)
    assert reader.schema == known
    assert len(reader.steps_after(0)[0]) == 1
    reader.close()


def test_the_size_to_ask_for_has_room_for_all_ranks_of_the_node(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    text = no_room(small_tmpfs / "not" / "there", 20 << 20)
    assert text.startswith(f"{small_tmpfs} is full: 2 MiB of 2 MiB are free, and a ring takes 20 M")
    assert "at least 160 MiB" in text
    assert "at least 128 MiB" in no_room(small_tmpfs, 4096)


def test_a_file_system_without_room_for_another_file_is_not_said_to_lack_bytes(
    small_tmpfs: Path,
) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", str(small_tmpfs)], check=True)
    (small_tmpfs / "other").touch()
    with pytest.raises(OSError):
        (small_tmpfs / "another").touch()
    text = no_room(small_tmpfs, 4096)
    assert text == f"{small_tmpfs} is full: it holds all 2 files that it may (df -i; nr_inodes)"


def test_a_tmpfs_that_fills_later_harms_neither_the_rank_nor_its_records(
    small_tmpfs: Path,
) -> None:
    path, known = small_tmpfs / "run" / "rank0.ring", schema()

    def rank() -> None:
        writer = RingWriter.create(path, identity())
        writer.write_schema(known)
        fill(small_tmpfs)
        for sequence in range(1, 2001):
            writer.write_step(step_record(known, sequence), complete=False)
            writer.write_step(step_record(known, sequence))

    assert exit_code_of(rank) == 0
    reader = RingReader.open(path)
    assert reader.schema == known
    records, lost = reader.steps_after(0)
    assert (len(records), lost) == (1024, 976)
    assert same_step(records[-1], step_record(known, 2000))
    reader.close()


def test_memory_is_reserved_when_the_ring_is_made(path: Path) -> None:
    writer = RingWriter.create(path, identity())
    writer.write_schema(schema(layers=1000))
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size
    writer.close()


def test_a_limit_on_file_sizes_gives_an_error(tmp_path: Path) -> None:
    def rank() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        writer = RingWriter.create(tmp_path / "rank0.ring", identity())
        with pytest.raises(OSError, match=r"may grow to 8 KiB \(ulimit -f\), and a ring needs"):
            writer.write_schema(schema())

    assert exit_code_of(rank) == 0
