"""MLflow: a run's directory below `mlruns`, or the SQLite database of a tracking store."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote

from mp_agent.backtest.log.columns import Row
from mp_agent.backtest.log.rows import Problems
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import ROWS_MAX, LogFormat, log_of_rows
from mp_agent.errors import LogError
from mp_agent.inputs.files import open_regular, read_text

_NAME = "mlflow"
_MAGIC = b"SQLite format 3\0"
_MILLISECONDS = 1000.0
_QUERY = (
    "select m.run_uuid, r.name, m.key, m.step, m.timestamp, m.value, m.is_nan from metrics m "
    "left join runs r on r.run_uuid = m.run_uuid order by m.run_uuid, m.timestamp, m.step"
)
_TABLES = "select name, type from sqlite_master where name in ('metrics', 'runs')"
_QUERY_SECONDS = 300.0

_Sample = tuple[int, float, str, float]
"""Step, Unix time, metric, value."""


def _recognises(path: Path, head: bytes) -> bool:
    if path.is_dir():
        return (path / "metrics").is_dir() and (path / "meta.yaml").is_file()
    return head.startswith(_MAGIC)


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    if not path.is_dir():
        return _of_database(path, options)
    problems = Problems()
    samples = list(islice(_of_directory(path / "metrics", problems), ROWS_MAX + 1))
    if len(samples) > ROWS_MAX:
        raise LogError(f"holds more than {ROWS_MAX} values")
    samples.sort(key=lambda sample: sample[1])
    if not samples:
        raise LogError("; ".join(problems.messages()) or "holds no metric")
    name = _tag(path, "mlflow.runName") or path.name
    rows = _rows(samples)
    return [log_of_rows(path, _NAME, rows, options, name=name, problems=problems)]


def _tag(run: Path, name: str) -> str:
    tag = run / "tags" / name
    return read_text(tag).strip() if tag.is_file() else ""


def _of_directory(metrics: Path, problems: Problems) -> Iterator[_Sample]:
    for file in sorted(path for path in metrics.rglob("*") if path.is_file()):
        metric = file.relative_to(metrics).as_posix()
        for line, content in enumerate(read_text(file).splitlines(), start=1):
            parts = content.split()
            try:
                time, value, *step = parts
                number = int(step[0]) if step else line - 1
                yield number, float(time) / _MILLISECONDS, metric, float(value)
            except ValueError:
                problems.add(line, f"of metrics/{metric} holds {content[:60]!r}")


def _of_database(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    runs: dict[tuple[str, str], list[_Sample]] = {}
    try:
        for uuid, name, key, step, time, value, is_nan in _database_rows(path):
            number = float("nan") if is_nan else float(value)
            sample = (int(step), float(time) / _MILLISECONDS, str(key), number)
            runs.setdefault((str(uuid), str(name or uuid)), []).append(sample)
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise LogError(f"is no database of MLflow: {error}") from error
    logs, failed = [], []
    for (_, name), samples in runs.items():
        try:
            logs.append(log_of_rows(path, _NAME, _rows(samples), options, name=name))
        except LogError as error:
            failed.append(type(error)(f"run {name}: {error}"))
    if not logs:
        raise failed[0] if failed else LogError("holds no metric")
    return logs


def _database_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a database's metrics. Raises sqlite3.Error, OSError and LogError."""
    open_regular(path).close()
    # A path may hold what a URI gives a meaning to.
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        # A view in their place could compute without end, and call what it likes.
        kinds = dict(database.execute(_TABLES).fetchall())
        if any(kinds.get(name) != "table" for name in ("metrics", "runs")):
            raise LogError("is no database of MLflow: it lacks the tables metrics and runs")
        database.execute("pragma trusted_schema = off")
        deadline_seconds = monotonic() + _QUERY_SECONDS
        database.set_progress_handler(lambda: int(monotonic() > deadline_seconds), 100_000)
        for count, row in enumerate(database.execute(_QUERY), start=1):
            if count > ROWS_MAX:
                raise LogError(f"holds more than {ROWS_MAX} values")
            yield row


def _rows(samples: Sequence[_Sample]) -> list[Row]:
    """Return the samples as rows in the order of their times; those of one step together."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for step, time, metric, value in samples:
        if not rows or rows[-1][1]["step"] != step:
            rows.append((len(rows) + 1, {"step": step, "wall_time": time}))
        rows[-1][1][metric] = value
    return [(line, row) for line, row in rows]


MLFLOW = LogFormat(_NAME, _recognises, _read)
