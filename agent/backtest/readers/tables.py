"""Reads CSV, JSON and JSON lines, and the state files of transformers."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.columns import QUANTITIES, STEP, Row, choose_columns, number, plain
from mp_agent.backtest.log.rows import EPOCH, Problems, rows_of_columns
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import (
    NOTEBOOK,
    LogFormat,
    bounded_rows,
    log_of_rows,
    run_name,
)
from mp_agent.errors import LogError, NothingToJudge, SourceError
from mp_agent.inputs.files import bounded_values, parse_json, read_text

_CSV_NAME = "csv"
_CSV_SUFFIXES = (".csv", ".tsv")
_CSV_HEADING = re.compile(rb"[\w ./-]+(?:,[\w ./-]+)+\r*\n")
_DELIMITERS = ",;\t"
"""Where the decimal point is a comma, values are between semicolons."""
_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+,\d+(?:[eE][+-]?\d+)?\s*")
_TEXT_SUFFIXES = (".log", ".txt", ".out")
_PLACES = {EPOCH, *QUANTITIES[STEP]}
_FIELD_CHARACTERS_MAX = 1_000_000
_CHART_COLUMN = re.compile(r"^(?P<run>.+) - (?P<metric>[^-]+?)$")
_CHART_EXTREMES = ("__MIN", "__MAX")


def _recognises_csv(path: Path, head: bytes) -> bool:
    if path.suffix in _CSV_SUFFIXES:
        return True
    # Keras' documentation calls the file of its CSVLogger `training.log`.
    heading = _CSV_HEADING.match(head)
    if heading is None or path.suffix not in _TEXT_SUFFIXES:
        return False
    names = heading[0].decode("ascii", "replace").strip().split(",")
    try:
        return bool(choose_columns(names, {})) and any(plain(name) in _PLACES for name in names)
    except NothingToJudge:
        return False


def _read_csv(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    text = read_text(path)
    problems = Problems()
    heading = text.partition("\n")[0]
    delimiter = "\t" if path.suffix == ".tsv" else max(_DELIMITERS, key=heading.count)
    rows = bounded_rows(_rows_csv(bounded_values(text, delimiter + "\n"), delimiter, problems))
    if not rows:
        raise LogError("; ".join(problems.messages()) or "holds no row below its heading")
    logs, failed = [], []
    for name, own in _by_run(rows, run_name(path)).items():
        try:
            logs.append(log_of_rows(path, _CSV_NAME, own, options, name=name, problems=problems))
        except LogError as error:
            failed.append(error)
    if not logs:
        raise failed[0]
    return logs


def _rows_csv(text: str, delimiter: str, problems: Problems) -> Iterator[Row]:
    csv.field_size_limit(_FIELD_CHARACTERS_MAX)
    lines = csv.reader(io.StringIO(text.replace("\0", "")), delimiter=delimiter)
    try:
        heading = [name.strip().strip("\ufeff") for name in next(lines, [])]
        if not any(heading):
            raise LogError("line 1: holds no column names")
        known: set[str] = set()
        for place, name in enumerate(heading):
            if name in known:
                problems.add(1, f"column {name!r} occurs again")
                heading[place] = ""  # no name is that of a quantity
            known |= {name} - {""}
        for cells in lines:
            if delimiter == ";":
                cells = [_with_point(cell) for cell in cells]
            if len(cells) > len(heading):
                problems.add(
                    lines.line_num, f"holds {len(cells)} values, the heading {len(heading)}"
                )
            elif cells:
                # A shorter line is one that was cut off: its last value may be too.
                whole = cells if len(cells) == len(heading) else cells[:-1]
                yield lines.line_num, dict(zip(heading, whole, strict=False))
    except csv.Error as error:
        problems.add(lines.line_num, str(error))


def _with_point(cell: str) -> str:
    """Return a number with a decimal point in place of a comma; anything else as it is."""
    return cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell


def _by_run(rows: Sequence[Row], name: str) -> Mapping[str, Sequence[Row]]:
    """Return rows by run: a chart exported by W&B has a column per run, `RUN - METRIC`."""
    names = list(dict.fromkeys(column for _, row in rows for column in row))
    found = [(column, _CHART_COLUMN.match(column)) for column in names]
    runs: dict[str, dict[str, str]] = {}
    for column, match in found:
        if match and not column.endswith(_CHART_EXTREMES):
            runs.setdefault(match["run"], {})[column] = match["metric"]
    if not runs:
        return {name: rows}
    common = [column for column, match in found if not match]
    return {
        run: [
            (
                line,
                {
                    **{column: row[column] for column in common if column in row},
                    **{own[column]: row[column] for column in own if column in row},
                },
            )
            for line, row in rows
        ]
        for run, own in runs.items()
    }


CSV_TABLE = LogFormat(_CSV_NAME, _recognises_csv, _read_csv)


_JSON_LINES_NAME = "jsonl"
_OBJECT = re.compile(rb'\{\s*["}]')
_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")


def _recognises_json_lines(path: Path, head: bytes) -> bool:
    if path.suffix in _JSON_LINES_SUFFIXES:
        return True
    first, _, rest = head.lstrip().partition(b"\n")
    # Python's own notation, with single quotes, is the console of a trainer.
    is_object = _OBJECT.match(first) is not None and first.strip()[-1:] == b"}"
    # A `.json` file with a single object is a table, and a notebook is one object too.
    return is_object and (path.suffix not in (".json", NOTEBOOK) or rest.lstrip()[:1] == b"{")


def _read_json_lines(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    problems = Problems()
    rows = bounded_rows(_rows_json_lines(bounded_values(read_text(path), ",[{"), problems))
    if not rows:
        raise LogError("; ".join(problems.messages()) or "is empty")
    return [log_of_rows(path, _JSON_LINES_NAME, rows, options, problems=problems)]


def _rows_json_lines(text: str, problems: Problems) -> Iterator[Row]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            entry = parse_json(content)
        except SourceError as error:
            problems.add(line, str(error).partition(": ")[2] or str(error))
            continue
        if isinstance(entry, Mapping):
            yield line, entry
        else:
            problems.add(line, f"is {type(entry).__name__}, not an object")


JSON_LINES = LogFormat(_JSON_LINES_NAME, _recognises_json_lines, _read_json_lines)


_JSON_NAME = "json"


def _recognises_json(path: Path, head: bytes) -> bool:
    return path.suffix == ".json" and head.lstrip()[:1] in (b"{", b"[")


def _read_json(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    content = parse_json(read_text(path))
    problems = Problems("entry")
    if isinstance(content, list):
        return [
            log_of_rows(path, _JSON_NAME, _objects(content, problems), options, problems=problems)
        ]
    if not isinstance(content, Mapping):
        raise LogError(f"holds {type(content).__name__}; a table is an array or an object")
    rows = rows_of_columns(_columns(content))
    step_seconds = _fact(content, "seconds_per_step")
    return [
        log_of_rows(path, _JSON_NAME, rows, options, problems=problems, step_seconds=step_seconds)
    ]


def _objects(content: Sequence[Any], problems: Problems) -> list[Row]:
    rows: list[Row] = []
    for index, entry in enumerate(content, start=1):
        if isinstance(entry, Mapping):
            rows.append((index, entry))
        else:
            problems.add(index, f"is {type(entry).__name__}, not an object")
    return rows


def _columns(content: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the arrays; pandas writes an object from row to value for each column."""
    columns: dict[str, Sequence[Any]] = {}
    for name, values in content.items():
        if isinstance(values, list):
            columns[name] = values
        elif isinstance(values, Mapping) and all(str(key).isdigit() for key in values):
            columns[name] = list(values.values())
    if not columns:
        raise LogError(f"holds no array; keys: {', '.join(map(str, content)) or 'none'}")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise LogError(f"the arrays differ in length: {listed}")
    return columns


def _fact(content: Mapping[str, Any], name: str) -> float | None:
    try:
        value = number(content.get(name))
    except ValueError:
        return None
    return value if value is not None and 0 < value < 1e9 else None


JSON_TABLE = LogFormat(_JSON_NAME, _recognises_json, _read_json)


_TRANSFORMERS_NAME = "transformers"
SUMMARY = "train_runtime"
"""What the last entry of a training holds alone: means over all of it."""


def _recognises_transformers(path: Path, head: bytes) -> bool:
    return path.name == "trainer_state.json" or (
        path.suffix == ".json" and b'"log_history"' in head and head.lstrip()[:1] == b"{"
    )


def _read_transformers(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    state = parse_json(read_text(path))
    history = state.get("log_history") if isinstance(state, Mapping) else None
    if not isinstance(history, list) or not history:
        raise LogError("log_history is absent or empty")
    problems = Problems("log_history entry")
    rows: list[Row] = []
    step_seconds = None
    for index, entry in enumerate(history, start=1):
        if not isinstance(entry, Mapping):
            problems.add(index, f"is {type(entry).__name__}, not an object")
        elif SUMMARY in entry:
            step_seconds = step_seconds_of(entry)
        else:
            rows.append((index, entry))
    return [
        log_of_rows(
            path, _TRANSFORMERS_NAME, rows, options, problems=problems, step_seconds=step_seconds
        )
    ]


def step_seconds_of(summary: Mapping[str, Any]) -> float | None:
    """Return the time per step by the last entry of a training; None where it does not say."""
    try:
        rate = number(summary.get("train_steps_per_second"))
        runtime, steps = number(summary.get(SUMMARY)), number(summary.get("step"))
    except ValueError:
        return None
    if runtime and steps and runtime > 0 and steps > 0:
        return runtime / steps
    return 1 / rate if rate and rate > 0 else None


TRANSFORMERS = LogFormat(_TRANSFORMERS_NAME, _recognises_transformers, _read_transformers)
