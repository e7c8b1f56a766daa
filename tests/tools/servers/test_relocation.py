import pytest

from tools.servers.relocation import relocate, start_directory

WRITTEN = b"/usr/share/prometheus/alertmanager"


@pytest.fixture
def package(tmp_path):
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/server").write_bytes(b"before" + WRITTEN + b"after")
    return tmp_path


def test_the_path_in_the_binary_is_replaced_by_one_of_equal_length(package):
    assets = package / WRITTEN.decode().lstrip("/")
    assets.mkdir(parents=True)
    relocate(package)
    content = (package / "usr/bin/server").read_bytes()
    assert len(content) == len(b"before" + WRITTEN + b"after")
    assert content.startswith(b"before/proc/self/cwd/")
    assert content.endswith(b"/after")
    assert start_directory(package / "usr/bin/server") == assets


def test_a_package_without_assets_is_left_alone(package):
    relocate(package)
    assert WRITTEN in (package / "usr/bin/server").read_bytes()
    assert start_directory(package / "usr/bin/server") is None
