"""What ran with a release of torch is recorded as pytest reports it."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tools
from tools.compatibility import Record, read_records

TESTS = """
import pytest
def test_passes(): pass
def test_fails(): assert False
@pytest.fixture
def broken(): raise ValueError
def test_cannot_begin(broken): pass
@pytest.mark.xfail(strict=True)
def test_cannot_work(): assert False
@pytest.mark.skip
def test_is_skipped(): pass
"""
HIDE_TORCH = """
import importlib.util
found = importlib.util.find_spec
class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Hidden())
importlib.util.find_spec = lambda name, *more: None if name == "torch" else found(name, *more)
"""
RUNNER = """
import sys
from pathlib import Path
import pytest, tools.compatibility as plugin
plugin.DIRECTORY = Path("records")
sys.exit(pytest.main(sys.argv[1:], plugins=[plugin]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--numprocesses", "2")], ids=["alone", "parallel"])
def test_each_outcome_is_counted_and_each_failure_named(tmp_path: Path, options: tuple[str, ...]):
    (tmp_path / "test_outcomes.py").write_text(TESTS)
    environ = {**os.environ, "PYTHONPATH": str(Path(tools.__file__).parent.parent)}
    environ = {key: value for key, value in environ.items() if not key.startswith("PYTEST_")}
    command = (sys.executable, "-c", RUNNER, "-q", "--rootdir=.", "-p", "no:cacheprovider")
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    (record,) = read_records(tmp_path / "records")
    assert (record.passed, record.skipped, record.expected_failures) == (1, 1, 1)
    assert record.failed == ["test_outcomes.py::test_cannot_begin", "test_outcomes.py::test_fails"]
    assert (record.torch, record.python) == (torch.__version__, platform.python_version())


NEEDS_TORCH = """
import pytest
def test_passes(): pass
def test_needs_torch(): import torch
"""


@pytest.mark.slow
def test_without_torch_tests_that_need_it_are_skipped_and_others_run(tmp_path: Path):
    (tmp_path / "test_needs.py").write_text(NEEDS_TORCH)
    (tmp_path / "test_imports.py").write_text("import torch\ndef test_never(): pass\n")
    hidden = "from importlib.abc import MetaPathFinder\nimport sys\n" + HIDE_TORCH + RUNNER
    environ = {**os.environ, "PYTHONPATH": str(Path(tools.__file__).parent.parent)}
    environ = {key: value for key, value in environ.items() if not key.startswith("PYTEST_")}
    command = (sys.executable, "-c", hidden, "-q", "--rootdir=.", "-p", "no:cacheprovider")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_records(tmp_path / "records")
    assert (record.torch, record.passed, record.skipped) == ("none", 1, 2)


def test_releases_are_in_the_order_of_their_numbers(tmp_path: Path):
    for release in ("2.6.0", "2.13.0+cpu", "2.15.0"):
        fields = {"python": "3.11.7", "date": "2026-01-02", "passed": 1}
        fields |= {"skipped": 0, "expected_failures": 0, "failed": [], "torch": release}
        (tmp_path / f"{release}.json").write_text(json.dumps(fields))
    assert [each.torch for each in read_records(tmp_path)] == ["2.15.0", "2.13.0+cpu", "2.6.0"]
    assert all(isinstance(each, Record) for each in read_records(tmp_path))
