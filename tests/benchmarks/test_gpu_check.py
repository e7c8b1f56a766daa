"""The report of a GPU, on the processor with tiny sizes: it is run where it cannot be repaired."""

import pytest
import torch

from benchmarks import device_bandwidth, gpu_check, gradient_loggers, step_overhead
from benchmarks.gradient_loggers import PER_PARAMETER, Turns
from benchmarks.statistics_cost import Case
from benchmarks.targets import verdict
from benchmarks.training import Shape, make_training

CPU = torch.device("cpu")
MODEL = Shape("a tiny model", 16, 1, 2, 32, 2, 4)
CASE = Case("3 tensors", lambda device: [torch.ones(8, device=device) for _ in range(3)])
SIZES = gpu_check.Sizes(
    elements=1000, model=MODEL, small_model=MODEL, cases=(CASE,), turns=1, seconds=1e6
)


@pytest.fixture(autouse=True)
def _without_packages(monkeypatch):
    """No process of wandb's; what is not installed is part of the report."""
    monkeypatch.setattr(gradient_loggers, "_there", lambda name: not _needs_package(name))


def _needs_package(name: str) -> bool:
    return name in gradient_loggers._NEEDS


def targets_in(report: str) -> list[list[str]]:
    lines = report.rpartition("## Targets")[2].strip().splitlines()[4:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


@pytest.mark.slow
def test_the_whole_report_ends_with_every_target_and_its_verdict():
    sections = [each.text for each in gpu_check.report(CPU, SIZES) if not each.failed]
    assert len(sections) == len(list(gpu_check._sections(CPU, SIZES))) + 1
    rows = targets_in(sections[-1])
    assert len(rows) == 1 + 2 + 2 * len(PER_PARAMETER)
    assert "not measured: CpuStatistics" in rows[0][-1]
    assert all(row[-1].strip("*") in ("met", "missed", "undecided") for row in rows[1:3])
    assert [row[-1] for row in rows].count("**not installed**") == 4


@pytest.mark.slow
def test_a_section_that_fails_leaves_the_others_and_its_targets_are_not_measured(monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(device_bandwidth, "measure", fail)
    monkeypatch.setattr(step_overhead, "compare_training", fail)
    report = list(gpu_check.report(CPU, SIZES))
    assert sum(each.failed for each in report) == 4  # the small model's steps, too
    sections = [each.text for each in report]
    rows = targets_in(sections[-1])
    assert [row[2] for row in rows[:3]] == ["not measured"] * 3
    assert all("out of memory" in row[-1] for row in rows[:3])
    assert "grad.norm().item()" in "".join(sections[3:5])


def test_what_no_time_is_left_for_is_not_measured(monkeypatch):
    sizes = gpu_check.Sizes(model=MODEL, seconds=-1.0)
    *_, targets = gpu_check.report(CPU, sizes)
    rows = targets_in(targets.text)
    assert {row[2] for row in rows} == {"not measured"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_logger_that_fails_is_left_out_and_training_goes_on(monkeypatch, tmp_path, precision):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gradient_loggers, "get_total_norm", fail)
    training = make_training(CPU, MODEL, precision)
    turns = gradient_loggers.measure(training, CPU, 2, tmp_path)
    assert "out of memory" in turns.left_out["get_total_norm"]
    assert {len(each) for each in turns.seconds.values()} == {2}
    assert set(turns.seconds) == {"nothing", "mp_agent", PER_PARAMETER[0]}


@pytest.mark.parametrize(
    ("own", "other", "measured", "expected"),
    [
        (1.01, 1.2, "20.0 times", "met"),
        (1.01, 1.05, "5.0 times", "missed"),
        (1.0, 1.05, "inf times", "met"),
        (1.0, 1.0, "nan times", "undecided"),
    ],
)
def test_how_many_times_cheaper_than_a_logger(own, other, measured, expected):
    turns = {"nothing": [1.0] * 5, "mp_agent": [own] * 5, PER_PARAMETER[0]: [other] * 5}
    target = gradient_loggers.targets(Turns(turns, dict.fromkeys(PER_PARAMETER, "")), "x")[0]
    assert (target.measured, target.verdict) == (measured, expected)


def test_an_interval_around_the_limit_decides_nothing():
    assert [verdict(lambda x: x <= 1.0, *ends) for ends in [(0, 1), (0, 2), (2, 3)]] == [
        "met",
        "undecided",
        "missed",
    ]
