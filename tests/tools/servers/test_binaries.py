import os
from pathlib import Path

import pytest

from tools.servers import binaries


@pytest.fixture(autouse=True)
def empty_machine(tmp_path, monkeypatch):
    """No binaries on PATH, nothing unpacked, no apt."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(binaries, "CACHE", tmp_path / "cache")
    binaries.find.cache_clear()
    yield
    binaries.find.cache_clear()


def make_executable(path: Path, version: str = "") -> Path:
    """Write a program that reports `version` as its first line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def test_a_binary_on_path_wins_over_an_unpacked_one(tmp_path):
    make_executable(tmp_path / "cache/promtool/usr/bin/promtool")
    on_path = make_executable(tmp_path / "bin/promtool", "promtool, version 2.53.3+ds1 (branch: x)")
    assert binaries.find("promtool") == on_path


@pytest.mark.parametrize(
    "version", ["promtool, version 2.42.0+ds (branch: debian/sid)", "", "promtool, version (none)"]
)
def test_a_binary_on_path_that_is_too_old_or_reports_no_version_is_passed_over(tmp_path, version):
    unpacked = make_executable(tmp_path / "cache/promtool/usr/bin/promtool")
    make_executable(tmp_path / "bin/promtool", version)
    assert binaries.find("promtool") == unpacked


def test_a_binary_that_is_too_old_is_named_where_none_can_be_fetched(tmp_path, capsys):
    old = make_executable(tmp_path / "bin/promtool", "promtool, version 2.42.0+ds")
    assert binaries.find("promtool") is None
    assert f"promtool: {old} is older than 2.53, and apt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "version", ["prometheus, version 3.5.0 (branch: HEAD)", "prometheus, version 2.100.0"]
)
def test_versions_are_compared_as_numbers(tmp_path, version):
    on_path = make_executable(tmp_path / "bin/prometheus", version)
    assert binaries.find("prometheus") == on_path


def test_a_version_within_a_build_tag_is_read(tmp_path):
    on_path = make_executable(
        tmp_path / "bin/victoria-metrics", "victoria-metrics-20250601-120000-tags-v1.119.0-0-gabc"
    )
    assert binaries.find("victoria-metrics") == on_path


def test_debian_s_name_of_a_binary_is_known(tmp_path):
    on_path = make_executable(
        tmp_path / "bin/prometheus-alertmanager", "alertmanager, version 0.28.1+ds"
    )
    assert binaries.find("alertmanager") == on_path


def test_an_unpacked_binary_is_found_without_apt(tmp_path):
    binary = make_executable(tmp_path / "cache/prometheus/usr/bin/prometheus")
    assert binaries.find("prometheus") == binary


def test_without_apt_a_missing_binary_is_none_and_says_why(capsys):
    assert binaries.find("prometheus") is None
    assert "prometheus: not on PATH, and apt cannot provide it" in capsys.readouterr().err


def test_the_machines_own_mirrors_are_asked_in_order_and_the_last_failure_is_named(
    tmp_path, capsys
):
    asked = tmp_path / "asked"
    apt = make_executable(tmp_path / "bin/apt-get")
    apt.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = indextargets ]; then\n'
        "  echo 'http://first.test/debian/ bookworm'\n"
        "  echo 'http://first.test/debian/ bookworm-updates'\n"
        "  echo 'http://security.test/debian bookworm-security'\n"
        "  echo 'http://second.test/debian/ stable'\n"
        "  exit 0\n"
        "fi\n"
        f'read -r line < "${{3%/*}}/sources.list"; echo "$line" >> {asked}\n'
        "echo 'E: no such suite' >&2; exit 100\n"
    )
    assert binaries.find("prometheus") is None
    assert "E: no such suite" in capsys.readouterr().err
    mirrors = [line.split("http://")[1].split("/")[0] for line in asked.read_text().splitlines()]
    assert mirrors == ["first.test", "second.test"]
    assert all(f" {binaries.SUITE} main" in line for line in asked.read_text().splitlines())


def test_what_is_unpacked_belongs_to_the_project_alone(tmp_path):
    binaries.find("prometheus")
    assert os.listdir(tmp_path / "cache") == [".lock"]
