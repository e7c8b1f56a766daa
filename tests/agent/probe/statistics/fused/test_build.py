"""Kernels come from a cache on the node, compiled once; without them it is said once."""

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mp_agent.probe.statistics import for_device
from mp_agent.probe.statistics.fused import build
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[5]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    build.launchable.cache_clear()
    build._say_once.cache_clear()


def test_without_a_usable_gpu_stock_operations_do_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "mp_agent"):
        assert isinstance(for_device(CUDA), PackedStatistics)
        assert isinstance(for_device(CUDA), PackedStatistics)
    (record,) = caplog.records
    assert "stock operations" in record.getMessage()


def test_kernels_are_loaded_once_for_all_streams_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[torch.device] = []
    kernels = SimpleNamespace(COLUMNS=GRADIENT_COLUMN_NAMES, launch_once=loaded.append)
    monkeypatch.setattr(build, "import_module", lambda _: kernels)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    other = torch.device("cuda", 1)
    assert [build.launchable(each) for each in (CUDA, CUDA, other)] == [kernels] * 3
    assert loaded == [CUDA, other]


def test_an_error_of_the_device_is_not_taken_for_one_of_the_kernels(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    kernels = SimpleNamespace(COLUMNS=GRADIENT_COLUMN_NAMES, launch_once=fails)
    monkeypatch.setattr(build, "import_module", lambda _: kernels)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        build.launchable(CUDA)
    assert not caplog.records


def test_without_triton_the_reason_names_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(build, "import_module", missing)
    with caplog.at_level(logging.WARNING, "mp_agent"):
        assert build.launchable(CUDA) is None
    assert "No module named 'triton'" in caplog.text


def test_the_interpreter_is_never_given_a_gpu(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with caplog.at_level(logging.WARNING, "mp_agent"):
        assert build.launchable(CUDA) is None
    assert "TRITON_INTERPRET" in caplog.text


@pytest.mark.parametrize("columns", [GRADIENT_COLUMN_NAMES[:-1], (*GRADIENT_COLUMN_NAMES, "new")])
def test_kernels_that_lack_a_column_are_not_used(
    columns: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "import_module", lambda _: SimpleNamespace(COLUMNS=columns))
    with caplog.at_level(logging.WARNING, "mp_agent"):
        assert build.launchable(CUDA) is None
    assert "do not measure" in caplog.text


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        (build.GRADIENT_KERNELS, "gradients are measured with stock"),
        (build.DISTRIBUTION_KERNELS, "the distribution of gradients is measured with stock"),
    ],
)
def test_what_is_measured_without_kernels_is_named(
    kernels: build.Kernels,
    said: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "import_module", lambda _: SimpleNamespace(COLUMNS=("new",)))
    with caplog.at_level(logging.WARNING, "mp_agent"):
        assert build.launchable(CUDA, kernels) is None
    assert caplog.text.count(said) == 1
    assert ", ".join(sorted({*kernels.columns, "new"})) in caplog.text


def test_each_set_of_kernels_is_compiled_by_a_module_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        build,
        "import_module",
        lambda name: SimpleNamespace(compile_all=lambda: compiled.append(name)),
    )
    assert build.main([]) == 0
    assert build.main(["--distribution"]) == 0
    of_gradients, of_distribution = build.GRADIENT_KERNELS.module, build.DISTRIBUTION_KERNELS.module
    assert compiled == [of_gradients, of_gradients, of_distribution]


@pytest.mark.slow
def test_importing_the_probe_imports_no_triton() -> None:
    code = "import sys, mp_agent, mp_agent.probe.statistics; sys.exit('triton' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".editable")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0


def test_triton_compiles_into_a_directory_of_this_user_on_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    with build.node_cache() as directory:
        assert os.environ["TRITON_CACHE_DIR"] == str(directory)
        assert directory.parent == tmp_path
        assert directory.stat().st_mode & 0o777 == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    with build.node_cache():
        pass
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    with build.node_cache() as directory:
        pass
    directory.chmod(0o777)
    with pytest.raises(PermissionError, match="this user alone"), build.node_cache():
        pass
    directory.chmod(0o700)
    (tmp_path / "target").mkdir()
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    directory.symlink_to(tmp_path / "target")
    with pytest.raises(PermissionError), build.node_cache():
        pass


def test_one_process_at_a_time_compiles_but_none_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with build.node_cache() as directory:
        with (directory / "lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        monkeypatch.setattr(build, "LOCK_SECONDS_AT_MOST", 0.0)
        with build.node_cache():
            pass
    with (directory / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
