"""MLflow: a run's directory below `mlruns`, or the SQLite database of a tracking store."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.rows import Problems, Row
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat, log_of_rows, read_text
from mp_agent.errors import LogError

_NAME = "mlflow"
_MAGIC = b"SQLite format 3\0"
_MILLISECONDS = 1000.0
_QUERY = (
    "select m.run_uuid, r.name, m.key, m.step, m.timestamp, m.value, m.is_nan from metrics m "
    "left join runs r on r.run_uuid = m.run_uuid order by m.run_uuid, m.timestamp, m.step"
)

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
    samples = sorted(_of_directory(path / "metrics", problems), key=lambda sample: sample[1])
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
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            for uuid, name, key, step, time, value, is_nan in database.execute(_QUERY):
                number = float("nan") if is_nan else float(value)
                sample = (int(step), float(time) / _MILLISECONDS, str(key), number)
                runs.setdefault((uuid, name or uuid), []).append(sample)
    except (sqlite3.Error, TypeError, ValueError) as error:
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


def _rows(samples: Sequence[_Sample]) -> list[Row]:
    """Return the samples as rows in the order of their times; those of one step together."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for step, time, metric, value in samples:
        if not rows or rows[-1][1]["step"] != step:
            rows.append((len(rows) + 1, {"step": step, "wall_time": time}))
        rows[-1][1][metric] = value
    return [(line, row) for line, row in rows]


MLFLOW = LogFormat(_NAME, _recognises, _read)
