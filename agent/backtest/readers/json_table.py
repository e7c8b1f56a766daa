"""JSON files that hold a table: an array of objects, or an object of arrays of equal length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.columns import number
from mp_agent.backtest.log.rows import Problems, Row, rows_of_columns
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat, log_of_rows
from mp_agent.errors import LogError
from mp_agent.inputs.files import read_text
from mp_agent.inputs.texts import parse_json

_NAME = "json"


def _recognises(path: Path, head: bytes) -> bool:
    return path.suffix == ".json" and head.lstrip()[:1] in (b"{", b"[")


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    content = parse_json(read_text(path))
    problems = Problems("entry")
    if isinstance(content, list):
        return [log_of_rows(path, _NAME, _objects(content, problems), options, problems=problems)]
    if not isinstance(content, Mapping):
        raise LogError(f"holds {type(content).__name__}; a table is an array or an object")
    rows = rows_of_columns(_columns(content))
    step_seconds = _fact(content, "seconds_per_step")
    return [log_of_rows(path, _NAME, rows, options, problems=problems, step_seconds=step_seconds)]


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


JSON_TABLE = LogFormat(_NAME, _recognises, _read)
