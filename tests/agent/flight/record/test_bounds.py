"""Flight records from others: what they would cost is known before anything is unpacked."""

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mp_agent.cli import main
from mp_agent.errors import FlightError
from mp_agent.flight.record import manifest
from mp_agent.flight.record.archive import read_archive, write_archive
from tests.agent.flight.builders import make_log, make_node_record, make_segment

Members = dict[str, bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    record = make_node_record(make_log(segments=(make_segment(tables=(1, 3)),)))
    path = tmp_path / "node0.npz"
    with path.open("wb") as file:
        write_archive(file, record)
    return path


def rewritten(path: Path, change: Callable[[Members], None]) -> None:
    """Change the members of an archive."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def with_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of an archive."""

    def changed(members: Members) -> None:
        manifest = json.loads(members["manifest.json"])
        change(manifest)
        members["manifest.json"] = json.dumps(manifest).encode()

    rewritten(path, changed)


def refused(path: Path) -> str:
    """Return the one line with which a post-mortem refuses a record."""
    result = CliRunner().invoke(main, ["postmortem", str(path)])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    assert str(path) in line
    return line


def patch_directory(path: Path, name: str, offset: int, form: str, value: int) -> None:
    """Overwrite a field of a member's entry in the archive's directory."""
    content = bytearray(path.read_bytes())
    at = content.rfind(name.encode()) - 46
    assert content[at : at + 4] == b"PK\1\2"
    struct.pack_into(form, content, at + offset, value)
    path.write_bytes(content)


def test_a_manifest_of_3_gb_is_refused_by_the_directory(path: Path) -> None:
    patch_directory(path, "manifest.json", 24, "<I", 3 << 30)
    assert "its manifest has 3221225472 bytes" in refused(path)


def test_arrays_that_would_fill_memory_are_refused_by_the_directory(path: Path) -> None:
    patch_directory(path, "rank0/0/values.npy", 24, "<I", 0xFFFF_FF00)
    assert "bytes unpacked, more than" in refused(path)


def test_an_encrypted_archive_is_named_as_one(path: Path) -> None:
    patch_directory(path, "manifest.json", 8, "<H", 1)
    assert refused(path).endswith("is encrypted")


def test_other_compressions_are_refused(path: Path) -> None:
    patch_directory(path, "manifest.json", 10, "<H", 14)
    assert "compressed by a method" in refused(path)


def test_a_directory_without_end_is_refused(path: Path) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, content.rfind(b"PK\5\6") + 12, 0xFFFF_FFFE)
    path.write_bytes(content)
    assert "its directory has more than" in refused(path)


def test_a_pipe_or_a_sparse_file_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "node0.npz"
    path.symlink_to("/dev/zero")
    assert "not a regular file" in refused(path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "holds 1099511627776 bytes" in refused(path)


@pytest.mark.parametrize(
    ("identity", "problem"),
    [
        ({"world_size": 2**40}, "world_size is 1099511627776"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": -1}, "world_size is -1"),
        ({"world_size": 10**30}, "world_size is 1000000000000000000000000000000"),
        ({"rank": 7}, "rank 7 of node 0 is none of"),
        ({"node_rank": 2**40}, "is none of"),
        ({"created_unix_ns": -(2**62)}, "s since 1970"),
    ],
)
def test_ranks_that_no_run_has_are_refused(
    path: Path, identity: dict[str, int], problem: str
) -> None:
    with_manifest(path, lambda manifest: manifest["ranks"][0]["identity"].update(identity))
    assert problem in refused(path)


def test_times_that_no_calendar_has_are_refused(path: Path) -> None:
    with_manifest(path, lambda manifest: manifest.update(written_unix_seconds=1e300))
    assert "1e+300 s since 1970" in refused(path)


def test_one_array_that_is_referred_to_again_and_again_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "ROWS_MAX", 1000)

    def repeat(manifest: dict[str, Any]) -> None:
        manifest["ranks"][0]["segments"] *= 400

    with_manifest(path, repeat)
    assert "rows, of" in refused(path)


def test_layers_that_every_schema_repeats_are_counted(path: Path) -> None:
    def repeat(manifest: dict[str, Any]) -> None:
        layers = manifest["layers"][0]
        for name in ("names", "shares", "elements"):
            layers[name] = layers[name][:1] * 100_000
        manifest["schemas"] *= 41

    with_manifest(path, repeat)
    assert "its schemas have 4100000 layers" in refused(path)


@pytest.mark.parametrize("shape", [(2**40,), (2**20, 2**20), (-1,), (2**62, 2**62)])
def test_an_array_that_claims_a_shape_is_not_allocated(path: Path, shape: tuple[int, ...]) -> None:
    def claim(members: Members) -> None:
        file = io.BytesIO()
        header = {"descr": "<f8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        members["rank0/0/values.npy"] = file.getvalue()

    rewritten(path, claim)
    assert "damaged: rank0/0/values.npy: an array of shape" in refused(path)


@pytest.mark.parametrize("header", [b"{'shape': (1,), q", b"{[]: 1}", b"(" * 100, b"{'descr': \0"])
def test_an_array_whose_header_is_no_python_is_refused(path: Path, header: bytes) -> None:
    def damage(members: Members) -> None:
        padded = header.ljust(117) + b"\n"
        members["rank0/0/values.npy"] = b"\x93NUMPY\1\0" + struct.pack("<H", 118) + padded

    rewritten(path, damage)
    assert "rank0/0/values.npy: an array's header cannot be read" in refused(path)


def test_a_pickle_is_never_loaded(path: Path, tmp_path: Path) -> None:
    def pickled(members: Members) -> None:
        file = io.BytesIO()
        np.lib.format.write_array(file, np.array([Trap(tmp_path / "sprung")], dtype=object))
        members["rank0/0/values.npy"] = file.getvalue()

    rewritten(path, pickled)
    assert "holds object" in refused(path)
    assert not (tmp_path / "sprung").exists()


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, (str(self.path), "w"))


def test_members_with_paths_are_written_nowhere(path: Path) -> None:
    def slip(members: Members) -> None:
        members["../../slipped"] = b"x"
        members["/slipped"] = b"x"

    before = {one for one in path.parent.rglob("*")}
    rewritten(path, slip)
    assert read_archive(path).ranks
    assert {one for one in path.parent.rglob("*")} == before


def test_names_cannot_control_the_terminal_nor_the_page(path: Path, tmp_path: Path) -> None:
    hostile = "\x1b]0;owned\x07\x9b2J\u202e<script>alert(1)</script>"

    def rename(manifest: dict[str, Any]) -> None:
        for name in ("run", "host"):
            manifest["ranks"][0]["identity"][name] = hostile
        manifest["ranks"][0]["state"]["phase_name"] = hostile
        manifest["request"]["reason"] = hostile
        manifest["versions"][hostile] = hostile
        for layers in manifest["layers"]:
            layers["names"] = [f"{name}{hostile}" for name in layers["names"]]

    with_manifest(path, rename)
    page = tmp_path / "page.html"
    for options in ([], ["--json"], ["--html", str(page)]):
        result = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["postmortem", str(path), *options])
        assert result.exit_code == 0, result.output
        assert not set(result.output) & set("\x1b\x07\x9b\u202e")
    shown = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["postmortem", str(path)]).output
    assert r"\x1b]0;owned" in shown
    html = page.read_text()
    assert "<script>alert(1)" not in html
    assert not set(html) & set("\x1b\x07\x9b\u202e")


def test_every_command_that_reads_a_record_refuses_it_alike(path: Path, tmp_path: Path) -> None:
    with_manifest(path, lambda manifest: manifest["ranks"][0]["identity"].update(world_size=2**40))
    for command in (
        ["backtest", str(path)],
        ["tune", str(path)],
        ["export", str(path), "--to", "csv", "--output", str(tmp_path / "out.csv")],
        ["compare", str(path), str(path)],
        ["postmortem", str(path), "--html", str(tmp_path / "out.html")],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 2, (command, result.output)
        assert "world_size is 1099511627776" in result.output
        assert not list(tmp_path.glob("out*")) + list(tmp_path.glob(".*"))


def test_a_bound_names_the_file_for_callers_too(path: Path) -> None:
    patch_directory(path, "manifest.json", 8, "<H", 1)
    with pytest.raises(FlightError, match=r"node0\.npz: is encrypted"):
        read_archive(path)
