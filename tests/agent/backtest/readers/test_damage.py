"""Logs that are cut off, overwritten or made up: an error that names the file, or a shorter log."""

from pathlib import Path
from random import Random

import pytest

from mp_agent.backtest.log.steps import course_of
from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.readers.find import read_logs
from mp_agent.errors import LogError
from tests.agent.backtest.data.make import STEPS
from tests.agent.backtest.readers.samples import FORMATS, deepspeed

WRITERS = {**FORMATS, "deepspeed": deepspeed}
OF_FILES = [name for name in WRITERS if name != "mlflow database"]
"""SQLite has its own checks, and is slow to open over and over."""


def file_of(path: Path) -> Path:
    return path if path.is_file() else max(p for p in path.rglob("*") if p.is_file())


def read_or_refuse(path: Path) -> int:
    """Return how many points there are; 0 where the log is refused with its name."""
    try:
        logs = read_logs(str(path), ReadOptions())
    except LogError as error:
        assert str(path) in str(error)
        return 0
    return sum(len(list(course_of(log).steps())) for log in logs)


@pytest.mark.parametrize("name", OF_FILES)
def test_a_log_that_is_cut_off_anywhere_is_read_up_to_there_or_refused(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path)
    file = file_of(path)
    whole = file.read_bytes()
    random = Random(name)
    for _ in range(40):
        file.write_bytes(whole[: random.randrange(len(whole))])
        assert 0 <= read_or_refuse(path) <= STEPS + 3


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FILES)
def test_flipped_bytes_raise_nothing_else(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path)
    file = file_of(path)
    whole = file.read_bytes()
    random = Random(name)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(random.randrange(1, 30)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        file.write_bytes(bytes(damaged))
        read_or_refuse(path)


@pytest.mark.parametrize("name", OF_FILES)
def test_noise_under_the_name_of_a_log_raises_nothing_else(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path)
    file = file_of(path)
    random = Random(name)
    for size in (0, 1, 7, 8, 12, 100, 5000):
        file.write_bytes(random.randbytes(size))
        read_or_refuse(path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_binary_log_that_is_cut_off_keeps_what_is_whole(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path)
    file = file_of(path)
    file.write_bytes(file.read_bytes()[:-40])
    (log,) = read_logs(str(path), ReadOptions())
    assert STEPS - 2 <= len(log.points) <= STEPS
    assert any("breaks off" in note for note in log.notes) or len(log.points) == STEPS


def test_a_length_that_cannot_be_is_not_believed(tmp_path: Path):
    path = WRITERS["tensorboard"](tmp_path)
    file = file_of(path)
    content = bytearray(file.read_bytes())
    content[0:8] = (1 << 62).to_bytes(8, "little")
    file.write_bytes(bytes(content))
    with pytest.raises(LogError, match="record 1: is damaged"):
        read_logs(str(path), ReadOptions())


def test_a_csv_line_that_is_cut_off_loses_its_last_value_only(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("step,loss,grad_norm\n1,2.0,1.0\n2,2.5,1.")
    (log,) = read_logs(str(path), ReadOptions())
    assert [point.loss for point in log.points] == [2.0, 2.5]
    path.write_text("step,loss,grad_norm\n1,2.0,1.0\n2,2.")
    (log,) = read_logs(str(path), ReadOptions())
    assert [point.loss for point in log.points] == [2.0]


def test_a_line_with_too_many_values_is_named(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("step,loss\n1,2.0\n2,3.0,4.0\n3,5.0\n")
    (log,) = read_logs(str(path), ReadOptions())
    assert [point.step for point in log.points] == [1, 3]
    assert log.notes == ("line 3: holds 3 values, the heading 2; it is left out",)


def test_of_columns_of_one_name_the_first_is_read_and_the_others_are_noted(tmp_path: Path):
    path = tmp_path / "run.csv"
    path.write_text("step,loss,,loss,\n1,2.5,,7,\n2,2.0,,7,\n")
    (log,) = read_logs(str(path), ReadOptions())
    assert [point.loss for point in log.points] == [2.5, 2.0]
    assert "line 1: column 'loss' occurs again; it is left out" in log.notes
