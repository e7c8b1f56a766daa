"""Local rank 0 has the kernels compiled where torch knows GPUs, and never waits for that."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mp_agent.probe.processes import node_agent
from mp_agent.probe.processes.node_agent import KernelCompiler, Starting
from mp_agent.settings import Settings

ROOT = Path(__file__).parents[4]
MODULE = "mp_agent.probe.statistics.fused.build"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be started, by a process that is at work at once."""
    modules: list[list[str]] = []

    def start(module: list[str], environment: dict[str, str]) -> Starting:
        modules.append(module)
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(writing)
        return Starting(reading)

    monkeypatch.setattr(node_agent, "start_detached", start)
    return modules


def test_it_is_started_where_torch_is_built_for_gpus(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    compiler = KernelCompiler(Settings())
    compiler.begin()
    assert started == [[MODULE]]
    compiler.poll()
    assert compiler._starter is None


def test_kernels_of_the_distribution_are_compiled_where_it_is_measured(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    compiler = KernelCompiler(Settings(measure_distribution=True))
    compiler.begin()
    compiler.poll()
    assert started == [[MODULE, "--distribution"]]


def test_nothing_is_started_for_cpus(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    compiler = KernelCompiler(Settings())
    compiler.begin()
    compiler.poll()
    assert started == []


def test_nothing_is_started_for_kernels_that_are_switched_off(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    compiler = KernelCompiler(Settings(fused_kernels=False))
    compiler.begin()
    compiler.poll()
    assert started == []


def test_a_process_that_cannot_be_made_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Starting:
        raise BlockingIOError("no process can be made")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(node_agent, "start_detached", refuse)
    with caplog.at_level(logging.DEBUG, "mp_agent"):
        KernelCompiler(Settings()).begin()
    assert "no process can be made" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_the_process_ends_at_once_where_there_is_no_gpu(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / ".editable"),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", MODULE], env=environment, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_the_program_opens_in_place_of_the_pipe_is_neither_read_nor_closed(tmp_path):
    reading, writing = os.pipe()
    starting = Starting(reading)
    own = tmp_path / "own"
    own.write_bytes(b"own")
    with own.open("rb", buffering=0) as file:
        os.dup2(file.fileno(), reading)
    assert starting.poll() == 0
    assert os.read(reading, 3) == b"own"
    os.close(reading)
    os.close(writing)
