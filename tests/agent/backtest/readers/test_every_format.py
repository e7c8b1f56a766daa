"""Every format gives the same points of the same run, and is recognised by itself."""

from math import isnan
from pathlib import Path

import pytest

from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.readers.find import expand, format_names, read_logs
from mp_agent.errors import LogError
from tests.agent.backtest.data.make import BROKEN_STEP, STEPS
from tests.agent.backtest.readers.samples import FORMATS, ROWS, csv_table, deepspeed, transformers


def read(path: Path, **options):
    return read_logs(str(path), ReadOptions(**options))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_recognised_and_holds_every_number_of_the_run(name: str, tmp_path: Path):
    (log,) = read(FORMATS[name](tmp_path))
    assert log.format == name.partition(" ")[0]
    assert [point.step for point in log.points] == list(range(1, STEPS + 1))
    for point, row in zip(log.points, ROWS, strict=True):
        if point.step >= BROKEN_STEP:
            assert isnan(point.loss or 0.0) and isnan(point.grad_norm or 0.0)
        else:
            assert point.loss == pytest.approx(row["loss"], rel=1e-6)
            # Megatron prints three digits.
            assert point.grad_norm == pytest.approx(row["grad_norm"], abs=6e-4)
        assert point.learning_rate == pytest.approx(0.001)


@pytest.mark.parametrize("name", [*FORMATS, "none"])
def test_a_directory_is_searched_for_logs(name: str, tmp_path: Path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "notes.txt").write_text("nothing to see")
    if name == "none":
        assert [source.address for source in expand([str(tmp_path)])] == [str(tmp_path)]
        return
    path = FORMATS[name](tmp_path / "deeper")
    (source,) = expand([str(tmp_path)])
    assert Path(source.address) == path
    assert source.found


def test_every_format_that_is_named_is_tested() -> None:
    tested = {name.partition(" ")[0] for name in FORMATS} | {"deepspeed", "flight"}
    # In test_console.py:
    tested |= {"torchtitan", "nanogpt", "icefall", "llm.c", "build-nanogpt", "espnet", "litgpt"}
    assert tested == set(format_names())


def test_transformers_give_the_time_per_step_in_their_summary(tmp_path: Path):
    (log,) = read(transformers(tmp_path))
    assert log.step_seconds == 2.0


def test_of_checkpoints_the_newest_is_taken(tmp_path: Path):
    for number in (500, 1500, 1000):
        (tmp_path / f"checkpoint-{number}").mkdir()
        transformers(tmp_path / f"checkpoint-{number}")
    (source,) = expand([str(tmp_path)])
    assert "checkpoint-1500" in source.address


def test_a_checkpoint_gives_way_to_the_state_of_the_whole_run(tmp_path: Path):
    (tmp_path / "checkpoint-500").mkdir()
    transformers(tmp_path / "checkpoint-500")
    whole = transformers(tmp_path)
    (source,) = expand([str(tmp_path)])
    assert Path(source.address) == whole


def test_deepspeed_logs_overflows_with_the_scale_that_was_tried(tmp_path: Path):
    (log,) = read(deepspeed(tmp_path))
    assert log.format == "deepspeed"
    assert [point.loss_scale for point in log.points if point.skipped] == [65536, 32768, 16384]
    assert [point.loss for point in log.points if point.loss] == [2.5, 2.25]
    assert [point.learning_rate for point in log.points if point.loss] == [0.001, 0.002]
    assert not any(point.skipped_steps for point in log.points)


def test_deepspeed_counts_skips_that_have_no_line_of_their_own(tmp_path: Path):
    path = deepspeed(tmp_path)
    lines = [line for line in path.read_text().splitlines() if "OVERFLOW" not in line]
    path.write_text("\n".join(lines))
    (log,) = read(path)
    assert [point.skipped_steps for point in log.points] == [0, 3]


def test_megatron_counts_skips_since_its_last_line(tmp_path: Path):
    path = FORMATS["megatron"](tmp_path)
    path.write_text(path.read_text().replace("skipped iterations:   0", "skipped iterations:   1"))
    (log,) = read(path)
    assert {point.skipped_steps for point in log.points} == {1}


def test_fairseq_logs_the_scale_after_an_overflow(tmp_path: Path):
    path = FORMATS["fairseq"](tmp_path)
    note = (
        "2026-01-01 10:01:00 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring "
        "gradient, setting loss scale to: 64.0\n"
    )
    path.write_text(path.read_text() + note + note.replace("64.0", "32.0"))
    (log,) = read(path)
    assert [(p.loss_scale, p.step) for p in log.points if p.skipped] == [(128.0, 40), (64.0, 40)]


def test_a_chart_exported_by_wandb_holds_a_run_per_column(tmp_path: Path):
    path = tmp_path / "wandb_export.csv"
    path.write_text(
        '"Step","a-1 - train/loss","a-1 - train/loss__MIN","a-1 - train/loss__MAX",'
        '"b - train/loss"\n"1","2.0","2.0","2.0","3.0"\n"2","1.5","1.5","1.5",""\n'
    )
    first, second = read(path)
    assert (first.name, [point.loss for point in first.points]) == ("a-1", [2.0, 1.5])
    assert (second.name, [point.loss for point in second.points]) == ("b", [3.0])


def test_a_column_can_be_named(tmp_path: Path):
    path = csv_table(tmp_path)
    path.write_text(path.read_text().replace("grad_norm", "my norm"))
    (log,) = read(path, columns={"grad_norm": "my norm"})
    assert log.points[0].grad_norm == pytest.approx(1 + 1 / 32)


def test_a_table_is_recognised_by_its_heading_too(tmp_path: Path):
    """Keras' documentation calls the file of its CSVLogger `training.log`."""
    path = tmp_path / "training.log"
    path.write_text("epoch,accuracy,loss,val_loss\n0,0.5,3.0,9.0\n1,0.6,2.0,9.0\n")
    (log,) = read(path)
    assert (log.format, [point.loss for point in log.points]) == ("csv", [3.0, 2.0])
    path.write_text("epoch,name\n0,loss\n")
    with pytest.raises(LogError, match="is a log of no known format"):
        read(path)


def test_a_format_can_be_given(tmp_path: Path):
    path = csv_table(tmp_path).rename(tmp_path / "metrics.dat")
    with pytest.raises(LogError, match="is a log of no known format; known: flight, tensorboard"):
        read(path)
    (log,) = read(path, format="csv")
    assert len(log.points) == STEPS


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("trainer_state.json", "{}", "log_history is absent or empty"),
        ("trainer_state.json", '{"log_history": [', "line 1 column"),
        ("a.json", '{"loss": [1, 2], "step": [1]}', "the arrays differ in length: loss has 2"),
        ("a.json", '{"loss": 1}', "holds no array; keys: loss"),
        ("a.json", "[" * 100_000, "is nested too deeply"),
        ("a.csv", "", "line 1: holds no column names"),
        ("a.csv", "step,loss\n", "holds no row below its heading"),
        ("a.csv", "step,val_loss\n1,2\n", "no loss, gradient norm or loss scale; columns: step"),
        ("a.jsonl", "\n", "is empty"),
        ("a.jsonl", "nonsense\n", "line 1"),
        ("run.wandb", ":W&B\x00\x00\x00", "holds no history"),
        ("a.db", "SQLite format 3\0", "is no database of MLflow"),
    ],
)
def test_what_is_wrong_with_a_log_is_named_with_its_path(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content.encode())
    with pytest.raises(LogError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert problem in str(raised.value)


def test_what_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(LogError, match=r"gone\.csv: no such file or directory"):
        read(tmp_path / "gone.csv")


def test_megatron_without_colons_is_read_as_well(tmp_path: Path):
    path = tmp_path / "old.log"
    path.write_text(
        "".join(
            f" iteration {step}/  500 | elapsed time per iteration (ms): 123.4 | learning rate "
            f"1.000E-04 | lm loss 2.5E+00 | loss scale 65536.0 |\n"
            for step in (10, 20)
        )
    )
    (log,) = read(path)
    assert [(p.step, p.loss, p.loss_scale, p.learning_rate) for p in log.points] == [
        (step, 2.5, 65536.0, 1e-4) for step in (10, 20)
    ]


def test_a_notebook_that_is_none_is_refused_and_passed_in_a_directory(tmp_path: Path):
    for content, message in (('{"cells": 3}', "holds no list of cells"), ("{", "is no JSON")):
        (tmp_path / "other.ipynb").write_text(content)
        with pytest.raises(LogError, match=message):
            read(tmp_path / "other.ipynb")
    csv_table(tmp_path)
    assert [Path(one.address).name for one in expand([str(tmp_path)])] == ["metrics.csv"]
