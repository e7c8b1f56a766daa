"""fairseq: `train_inner` lines, as `name=value` or JSON, and its overflow notes."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.rows import Problems, Row
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat, bounded_rows, log_of_rows
from mp_agent.backtest.readers.text.lines import NUMBER, lines_of, stamp
from mp_agent.errors import LogError, SourceError
from mp_agent.inputs.texts import parse_json

_NAME = "fairseq"
_FIELD = re.compile(rf"\b([a-z][a-z0-9_]*)=({NUMBER})(?=[,\s]|$)")
_OVERFLOW = re.compile(
    rf"overflow detected, (?:ignoring gradient, )?setting (?:loss )?scale to:? (?:from \S+ to )?"
    rf"({NUMBER})"
)
_SCALE_FACTOR = 2.0
"""By which an overflow divides the scale: the note has the one after it."""
_MARKS = re.compile(rb"num_updates\"?[=:]\s*\"?\d|overflow detected, (?:ignoring|setting)")


def _recognises(path: Path, head: bytes) -> bool:
    return _MARKS.search(head) is not None


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    rows = bounded_rows(_rows(path))
    if not rows:
        raise LogError("holds no line with num_updates and no overflow")
    return [log_of_rows(path, _NAME, rows, options, problems=Problems())]


def _rows(path: Path) -> Iterator[Row]:
    step = 0
    for number, line in lines_of(path):
        row: dict[str, Any] = {}
        if found := _OVERFLOW.search(line):
            row = {"loss_scale": float(found[1]) * _SCALE_FACTOR, "skipped": 1.0}
        elif "num_updates" in line and "valid" not in line and "| train |" not in line:
            row = _fields(line)
            if "num_updates" not in row:
                continue
            step = int(row.pop("num_updates"))
        if not row:
            continue
        time_seconds = stamp(line)
        yield number, {"step": step, **row, **({"timestamp": time_seconds} if time_seconds else {})}


def _fields(line: str) -> dict[str, Any]:
    """Return the numbers of a line; one that cannot be read is left out."""
    begin = line.find("{")
    if begin < 0:
        return {name: float(value) for name, value in _FIELD.findall(line)}
    try:
        content = parse_json(line[begin:])
        fields = dict(content)
        return {**fields, "num_updates": float(fields["num_updates"])}
    except (SourceError, TypeError, ValueError, KeyError, OverflowError):
        return {}


FAIRSEQ = LogFormat(_NAME, _recognises, _read)
