import os
from pathlib import Path

import pytest

from tools import servers


@pytest.fixture(autouse=True)
def empty_machine(tmp_path, monkeypatch):
    """No binaries on PATH, nothing unpacked, no apt."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(servers, "CACHE", tmp_path / "cache")
    servers.find.cache_clear()
    yield
    servers.find.cache_clear()


def make_executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_binary_on_path_wins_over_an_unpacked_one(tmp_path):
    make_executable(tmp_path / "cache/promtool/usr/bin/promtool")
    on_path = make_executable(tmp_path / "bin/promtool")
    assert servers.find("promtool") == on_path


def test_debian_s_name_of_a_binary_is_known(tmp_path):
    on_path = make_executable(tmp_path / "bin/prometheus-alertmanager")
    assert servers.find("alertmanager") == on_path


def test_an_unpacked_binary_is_found_without_apt(tmp_path):
    binary = make_executable(tmp_path / "cache/prometheus/usr/bin/prometheus")
    assert servers.find("prometheus") == binary


def test_without_apt_a_missing_binary_is_none_and_says_why(capsys):
    assert servers.find("prometheus") is None
    assert "prometheus: not on PATH and not to be had by apt" in capsys.readouterr().err


def test_the_machine_s_own_mirrors_are_asked_in_order_and_the_last_failure_is_told(
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
    assert servers.find("prometheus") is None
    assert "E: no such suite" in capsys.readouterr().err
    mirrors = [line.split("http://")[1].split("/")[0] for line in asked.read_text().splitlines()]
    assert mirrors == ["first.test", "second.test"]
    assert all(f" {servers.SUITE} main" in line for line in asked.read_text().splitlines())


def test_what_is_unpacked_belongs_to_nobody_but_the_project(tmp_path):
    servers.find("prometheus")
    assert os.listdir(tmp_path / "cache") == [".lock"]
