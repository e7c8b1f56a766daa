"""Files of unknown origin: regular, bounded, in any encoding that logs have."""

import os
import tracemalloc
from pathlib import Path

import pytest

from mp_agent.inputs.files import encoding_of, open_regular, read_file, read_lines, read_text


@pytest.fixture(params=["fifo", "link to a device", "directory", "link to itself"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "run.csv"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if "device" in request.param else path)
    return path


def test_what_is_no_regular_file_is_refused_at_once(odd: Path):
    for read in (open_regular, read_file, read_text, lambda path: list(read_lines(path, 100))):
        with pytest.raises(OSError) as caught:
            read(odd)
        assert caught.value.filename == str(odd)
        assert caught.value.strerror in (
            "not a regular file",
            "Too many levels of symbolic links",
        )


def test_a_file_that_claims_a_terabyte_is_not_read(tmp_path: Path):
    path = tmp_path / "sparse.log"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    for read in (open_regular, read_file, read_text):
        with pytest.raises(OSError, match=r"holds 1099511627776 bytes, more than \d+"):
            read(path)


def test_a_file_of_the_kernel_without_a_size_is_bounded(tmp_path: Path):
    with pytest.raises(OSError, match="more than 10"):
        read_file("/proc/self/status", 10)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_text_is_read_in_the_encoding_that_it_has(tmp_path: Path, encoding: str):
    path = tmp_path / "run.csv"
    path.write_bytes("step,loss\n1,2 ü\n".encode(encoding))
    assert read_text(path) == "step,loss\n1,2 ü\n"
    assert list(read_lines(path, 100)) == [(1, "step,loss"), (2, "1,2 ü")]


def test_bytes_of_no_character_and_short_texts_are_utf_8(tmp_path: Path):
    path = tmp_path / "run.csv"
    path.write_bytes(b"loss \xff\n")
    assert read_text(path) == "loss \ufffd\n"
    assert [encoding_of(head) for head in (b"", b"\0", b"a\0", b"\0\0\0\0")] == ["utf-8"] * 4


def test_a_line_without_end_is_left_out_and_takes_no_memory(tmp_path: Path):
    path = tmp_path / "run.log"
    with path.open("wb") as file:
        file.write(b"first\n")
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b"\nlast")
    tracemalloc.start()
    lines = list(read_lines(path, 20_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines == [(1, "first"), (3, "last")]
    assert peak < 4 << 20
