"""`mp-agent export`: every number of a record is in the file, under its step and layer."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.find import read_logs
from mp_agent.cli import main
from mp_agent.node.cluster.root import MergedTable
from mp_agent.records.merged import MergedStep
from tests.agent.backtest.readers.test_flight import record_of

Key = tuple[int, str, str]


def export(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.fixture
def record(tmp_path: Path) -> Path:
    directory = tmp_path / "record"
    directory.mkdir()
    return record_of(directory)


def expected(log: TrainingLog) -> dict[Key, float]:
    """Return the numbers of a record by step, name and layer."""
    found: dict[Key, float] = {}
    step = 0
    for item in log.merged:
        if isinstance(item, MergedStep):
            step = item.step
            found.update({(step, name, ""): value for name, value in item.columns.items()})
            found.update({(step, f"gradients.{name}", ""): v for name, v in item.gradients.items()})
            if item.grad_norm is not None:
                found[step, "grad_norm", ""] = item.grad_norm
        elif isinstance(item, MergedTable):
            layers = item.families["gradients"]
            for row, layer in enumerate(layers.names):
                for at, column in enumerate(layers.family.columns):
                    value = float(layers.values[row, at])
                    if value == value:
                        found[step, f"gradients.{column.name}", layer] = value
    return found


def by_key(rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> dict[Key, float]:
    rows = list(rows)
    found = {(int(r["step"]), r["name"], r["layer"]): float(r["value"]) for r in rows}
    assert len(found) == len(rows), "a number is there twice"
    return found


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_table_holds_every_number_of_a_flight_record(record: Path, tmp_path: Path, form: str):
    path = tmp_path / f"run.{form}"
    result = export(record, "--to", form, "--output", path)
    assert result.exit_code == 0, result.output
    (log,) = read_logs(str(record), ReadOptions())
    wanted = expected(log)
    assert any(layer for _, _, layer in wanted) and (1, "loss", "") in wanted
    if form == "csv":
        with path.open(newline="") as file:
            found = by_key(list(csv.DictReader(file)))
    else:
        found = by_key(pq.read_table(path).to_pylist())
    assert found == wanted
    assert f"{path}: {len(wanted)} samples" in result.output


def test_tensorboard_events_are_read_back_as_they_were(record: Path, tmp_path: Path):
    pytest.importorskip("tensorboardX")
    result = export(record, "--to", "tensorboard", "--output", tmp_path / "events")
    assert result.exit_code == 0, result.output
    (directory,) = (tmp_path / "events").iterdir()
    (log,) = read_logs(str(directory), ReadOptions())
    (source,) = read_logs(str(record), ReadOptions())
    assert [point.step for point in log.points] == [point.step for point in source.points]
    assert [p.loss for p in log.points] == pytest.approx([p.loss for p in source.points])
    assert [p.grad_norm for p in log.points] == pytest.approx([p.grad_norm for p in source.points])


def test_a_file_that_exists_stays_as_it_is(record: Path, tmp_path: Path):
    path = tmp_path / "run.csv"
    path.write_text("mine")
    result = export(record, "--to", "csv", "--output", path)
    assert result.exit_code == 2 and "exists already" in result.output
    assert path.read_text() == "mine"


def test_another_log_is_refused_by_its_format_and_leaves_nothing(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": n, "loss": 1.0}) + "\n" for n in range(5)))
    result = export(log, "--to", "csv", "--output", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert "a flight record or the address of a Prometheus can be exported" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_source_that_is_not_there_is_named(tmp_path: Path):
    result = export(tmp_path / "none", "--to", "csv", "--output", tmp_path / "out.csv")
    assert result.exit_code == 2 and "none: no such file or directory" in result.output
