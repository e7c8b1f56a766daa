"""Logs that are no files, that never end, or whose names and values attack their reader."""

import json
import os
import pickle
import sqlite3
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mp_agent.backtest.readers import mlflow
from mp_agent.backtest.readers.tensorboard import masked_crc32c
from mp_agent.cli import main

GOOD = "step,loss,grad_norm\n" + "".join(f"{step},{2 - step / 100},1.0\n" for step in range(20))


def backtest(*arguments: object) -> Result:
    environ = {"COLUMNS": "400"}
    return CliRunner(env=environ).invoke(main, ["backtest", *map(str, arguments)])


def refused(result: Result) -> str:
    """Return the one line with which a command refuses."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    return line


@pytest.mark.parametrize("command", ["backtest", "tune"])
@pytest.mark.parametrize("name", ["run.csv", "run.jsonl", "events.out.tfevents.1"])
def test_a_folder_with_a_pipe_and_a_device_ends_with_the_logs_that_are_files(
    command: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    for place in ("pipe", "device", "loop"):
        (folder / place).mkdir(parents=True)
    os.mkfifo(folder / "pipe" / name)
    (folder / "device" / name).symlink_to("/dev/zero")
    (folder / "loop" / name).symlink_to(folder / "loop" / name)
    (folder / "loop" / "again").symlink_to(folder)
    (folder / "good.csv").write_text(GOOD)
    os.mkfifo(folder / "not-named-like-a-log")
    result = CliRunner(env={"COLUMNS": "400"}).invoke(main, [command, str(folder)])
    assert result.exit_code == (1 if command == "backtest" else 0), result.output
    if name.endswith(("csv", "jsonl")):
        assert f"pipe/{name}: not a regular file" in result.output
        assert f"device/{name}: not a regular file" in result.output
    if command == "backtest":
        assert "20 points of csv" in result.output
        pipe = folder / "not-named-like-a-log"
        assert refused(backtest(pipe)).endswith(f"{pipe}: not a regular file")


@pytest.mark.parametrize("name", ["run.csv", "run.json", "run.log", "r.wandb", "x.tfevents"])
def test_a_file_that_claims_a_terabyte_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert f"{path}: holds 1099511627776 bytes, more than" in refused(backtest(path))


def test_a_table_of_more_cells_than_memory_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_bytes(b"step,loss\n" + b"," * 20_000_001)
    assert "values, more than 20000000" in refused(backtest(path))
    path = tmp_path / "run.json"
    path.write_bytes(b"[" + b"[]," * 10_000_001 + b"[]]")
    assert "values, more than 20000000" in refused(backtest(path))


def test_folders_below_folders_do_not_exhaust_the_stack(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(1500):
        folder = folder / "d"
        try:
            folder.mkdir()
        except OSError:  # the path is too long for the system
            break
    (tmp_path / "good.csv").write_text(GOOD)
    assert backtest(tmp_path).exit_code == 0
    # pytest's own removal is recursive, and would fail in a later session.
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "log"])
def test_logs_of_windows_shells_are_read(encoding: str, kind: str, tmp_path: Path) -> None:
    lines = {
        "csv": GOOD,
        "jsonl": "".join(json.dumps({"step": n, "loss": 1.0}) + "\r\n" for n in range(20)),
        "log": "".join(f"step={n}, skipped=0, lr=[0.1]\r\n" for n in range(20)),
    }
    path = tmp_path / f"run.{kind}"
    path.write_bytes(lines[kind].encode(encoding))
    result = backtest(path)
    assert result.exit_code == 0, result.output
    assert "20 points of" in result.output


def test_names_that_are_no_utf_8_and_names_for_terminals_are_shown_with_escapes(
    tmp_path: Path,
) -> None:
    folder, page = tmp_path / "runs", tmp_path / "page.html"
    folder.mkdir()
    hostile = "\x1b]0;owned\x07<img src=x onerror=alert(1)>.csv"
    for name in (os.fsdecode(b"caf\xe9.csv"), hostile, "two\nlines.csv"):
        (folder / name).write_text(GOOD)
    for options in (["--html", page], ["--json"], ["--details"]):
        result = backtest(folder, *options)
        assert result.exit_code == 0, (options, result.output)
        assert not set(result.output) & set("\x1b\x07")
    assert r"two\nlines: " in backtest(folder, "--details").output
    html = page.read_text("utf-8")
    assert r"two\nlines" in html and "two\nlines" not in html
    assert r"caf\udce9" in html
    assert r"\x1b]0;owned\x07&lt;img" in html
    assert "<img src=x" not in html and "\x1b" not in html
    with_problem = folder / "\x1b[2Jbad\n.csv"
    with_problem.write_text("step,\x1b[31mcolumn\n1,2\n")
    shown = backtest(with_problem)
    assert r"\x1b[2Jbad\n.csv: no loss" in shown.output and "\x1b" not in shown.output


def test_damaged_numbers_of_every_kind_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    bad = [
        '{"step":1,"loss":' + "9" * 100_000 + "}",
        '{"loss":' * 50_000,
        '{"step":2,"loss":1e999999}',
        '{"step":9' + "0" * 400 + ',"loss":1}',
        '{"step":3,"loss":"\x00"}',
        '{"step":4,"loss":1,"_timestamp":1e300}',
        '{"step":5,"loss":1,"_timestamp":"9999-99-99"}',
    ]
    path.write_text(
        "\n".join([*bad, *(json.dumps({"step": n, "loss": 1.0}) for n in range(6, 20))])
    )
    result = backtest(path, "--details")
    assert result.exit_code == 0, result.output
    assert "line 1: " in result.output and "line 2: the JSON is nested too deeply" in result.output


def test_records_of_absurd_length_are_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    for length in (1 << 63, (1 << 26) + 1, 1 << 25):
        head = struct.pack("<Q", length)
        path.write_bytes(head + struct.pack("<I", masked_crc32c(head)) + b"x")
        assert "record 1: " in refused(backtest(path))
    wandb = tmp_path / "run.wandb"
    whole = struct.pack("<IHB", 0, 32_761 - 7, 2) + bytes(32_761 - 7)
    more = struct.pack("<IHB", 0, 32_761, 3) + bytes(32_761)
    wandb.write_bytes(b":W&B" + bytes(3) + whole + more * 2100)
    assert "longer than any" in refused(backtest(wandb))


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
            return (open, (str(sprung), "w"))

    for name in ("run.json", "run.csv", "node0.npz", "run.pkl", "run.jsonl"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps([Trap()]))
        refused(backtest(path))
    assert not sprung.exists()


TABLES = (
    "create table runs(run_uuid, name)",
    "create table metrics(run_uuid, key, step, timestamp, value, is_nan)",
)
ENDLESS = (
    "create table runs(run_uuid, name)",
    "create view metrics as with recursive r(n) as (select 1 union all select n + 1 from r) "
    "select 'a' run_uuid, 'loss' key, n step, n timestamp, 1.0 value, 0 is_nan from r",
)


def database(path: Path, *statements: str) -> Path:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


def test_a_database_cannot_compute_without_end(tmp_path: Path) -> None:
    assert "lacks the tables" in refused(backtest(database(tmp_path / "view.db", *ENDLESS)))
    odd = database(tmp_path / "o.db", *TABLES, "insert into metrics values(1, 2, 'x', null, 3, 4)")
    assert "is no database of MLflow" in refused(backtest(odd))


def test_a_query_of_a_database_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database(tmp_path / "run.db", *TABLES)
    monkeypatch.setattr(mlflow, "_QUERY_SECONDS", 0.05)
    endless = (
        "with recursive r(n) as (select 1 union all select n + 1 from r) select count(n) from r"
    )
    monkeypatch.setattr(mlflow, "_QUERY", endless)
    assert "interrupted" in refused(backtest(path))


def test_a_path_is_no_uri(tmp_path: Path) -> None:
    insert = "insert into metrics values('a', 'loss', 1, 1, 1.0, 0)"
    path = database(tmp_path / "run?mode=rwc#%41.db", *TABLES, insert)
    assert backtest(path).exit_code == 0
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


LAUGHS = 'a: &a ["lol"]\n' + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(20)
)


@pytest.mark.parametrize("command", ["backtest", "tune"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, "line 2: aliases are not read"),
        ("run: [healthy]", "has no label, but a list or"),
        ("run: " + "[" * 50_000, "nested too deeply"),
        ("run: " + "9" * 100_000, "it must be one of"),
        ("run: 2026-13-45", "it must be one of"),
        ('"\\e[2Jrun": bad', "it must be one of"),
        ("run: \x00", "is no YAML"),
    ],
)
def test_labels_without_end_are_refused_with_file_and_place(
    command: str, text: str, problem: str, tmp_path: Path
) -> None:
    labels, log = tmp_path / "labels.yaml", tmp_path / "run.csv"
    labels.write_text(text)
    log.write_text(GOOD)
    result = CliRunner().invoke(main, [command, str(log), "--labels", str(labels)])
    line = refused(result)
    assert str(labels) in line and problem in line
    assert len(line) < 1000 and "\x1b" not in line


def test_labels_are_read_from_a_file_alone(tmp_path: Path) -> None:
    labels, log = tmp_path / "labels.yaml", tmp_path / "run.csv"
    os.mkfifo(labels)
    log.write_text(GOOD)
    assert "not a regular file" in refused(backtest(log, "--labels", labels))
