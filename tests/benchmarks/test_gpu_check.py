"""The report for machines with a GPU is whole on any device, and survives a part that fails."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import device_bandwidth, gpu_check, gradient_loggers, statistics_cost
from benchmarks.step_overhead import Comparison
from benchmarks.training import TINY

CPU = torch.device("cpu")
SIZE = gpu_check.Size(
    turns=2,
    rounds=1,
    elements=1000,
    cases=(statistics_cost.Case("a few", lambda device: [torch.ones(9, device=device)]),),
    small=TINY,
    large=TINY,
)


@pytest.fixture
def without_installed_loggers(monkeypatch):
    """Leave out Lightning and wandb, as on a machine that lacks them."""
    monkeypatch.setattr(
        gradient_loggers, "_there", lambda name: name not in gradient_loggers._NEEDS
    )


@pytest.mark.usefixtures("without_installed_loggers")
def test_every_part_and_every_target_is_in_the_report(capsys):
    assert gpu_check.report(CPU, SIZE)
    printed = capsys.readouterr().out
    for name, _ in gpu_check.parts(CPU, SIZE):
        assert f"## {name}\n" in printed
    targets = printed.partition("## targets")[2]
    assert targets.count("| statistics' bytes per second") == 1
    for dtype in ("BF16", "FP16"):
        (added,) = re.findall(rf"\| added to a training step: .*{dtype}.*\|", targets)
        assert re.search(r"-?[0-9.]+% \(-?[0-9.]+% to -?[0-9.]+%\)", added)
        for name in gpu_check.PER_PARAMETER:
            assert len(re.findall(rf"\| what {re.escape(name)} adds.*{dtype}", targets)) == 1
    assert targets.count("not installed | not measured") == 4
    assert "not installed" in printed.partition("## targets")[0]


@pytest.mark.usefixtures("without_installed_loggers")
def test_a_part_that_fails_is_named_and_leaves_the_others(capsys, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_bandwidth, "measure_all", fails)
    assert not gpu_check.report(CPU, SIZE)
    printed = capsys.readouterr().out
    assert "CUDA out of memory" in printed
    assert printed.endswith("Not measured, since it failed: bandwidth.\n")
    assert "statistics' bytes per second" not in printed
    assert printed.count("added to a training step") == 2


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([1.001] * 9, "met"), ([1.02] * 9, "**missed**"), ([1.0, 1.02] * 9, "undecided")],
)
def test_a_share_of_the_step_is_judged_by_its_interval(ratios, verdict):
    compared = Comparison("a step", [1.0] * len(ratios), ratios)
    assert gpu_check._share_of_step(compared).verdict == verdict


def test_a_bandwidth_is_that_of_the_statistics_compared_with_the_copy():
    measured = device_bandwidth.Bandwidth(
        elements=10**6, dtype=torch.float32, copy=[10.0, 20.0], statistics=[9.0, 18.0], stock=[1, 2]
    )
    assert measured.share == pytest.approx(0.9)
    assert measured.cells()[3] == "**90%**" and measured.cells()[5] == "**10%**"


@pytest.mark.parametrize("code", [0, 1])
def test_tests_that_fail_fail_the_check_and_are_printed(capsys, monkeypatch, code):
    done = SimpleNamespace(returncode=code, stdout="a failure\n== 3 passed ==\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: done)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_check, "report", lambda *_: True)
    assert gpu_check.main() == code
    printed = capsys.readouterr().out
    assert "crashes): 3 passed" in printed
    assert ("a failure" in printed) == bool(code)


def test_without_a_gpu_there_is_nothing_to_check(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 0
    assert capsys.readouterr().out.startswith("Nothing to check")
