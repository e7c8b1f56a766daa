"""TensorBoard event files, read without TensorBoard: scalars by tag and step."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mp_agent.backtest.log.rows import Problems, Row
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.encoding.crc32c import masked_crc32c
from mp_agent.backtest.readers.encoding.protobuf import (
    Value,
    WireError,
    double,
    fields_of,
    message,
    signed,
    single,
    text,
)
from mp_agent.backtest.readers.format import LogFormat, bounded_rows, log_of_rows
from mp_agent.errors import LogError
from mp_agent.inputs.files import open_regular

_NAME = "tensorboard"
_PATTERN = "*tfevents*"
_RECORD_BYTES_MAX = 1 << 26
_FLOAT, _DOUBLE = 1, 2
"""Values of TensorFlow's DataType."""


def _recognises(path: Path, head: bytes) -> bool:
    return "tfevents" in path.name if path.is_file() else any(path.glob(_PATTERN))


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    files = [path] if path.is_file() else sorted(path.glob(_PATTERN))
    problems = Problems("record")
    rows = bounded_rows(row for file in files for row in _rows(file, problems))
    if not rows:
        raise LogError("; ".join(problems.messages()) or "holds no scalar")
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    return [log_of_rows(path, _NAME, rows, options, name=name, problems=problems)]


def _rows(path: Path, problems: Problems) -> Iterator[Row]:
    with open_regular(path) as file:
        for number, record in enumerate(_records(file, problems), start=1):
            try:
                scalars = _scalars(record)
            except WireError as error:
                problems.add(number, str(error))
                continue
            if len(scalars) > 2:
                yield number, scalars


def _records(file: BinaryIO, problems: Problems) -> Iterator[bytes]:
    """Yield the records of a file up to its end, or to where it is damaged."""
    number = 1
    while header := file.read(12):
        # A process that is still writing, or that was killed, leaves the last one incomplete.
        if len(header) < 12:
            problems.add(number, "breaks off")
            return
        length, crc = struct.unpack("<QI", header)
        if masked_crc32c(header[:8]) != crc or length > _RECORD_BYTES_MAX:
            problems.add(number, "is damaged; the rest of the file cannot be read")
            return
        record = file.read(length)
        if len(record) < length:
            problems.add(number, "breaks off")
            return
        file.seek(4, 1)
        yield record
        number += 1


def _scalars(event: bytes) -> dict[str, Any]:
    """Return step, time and the scalars of an event by tag."""
    row: dict[str, Any] = {"step": 0, "wall_time": None}
    for number, value in fields_of(event):
        if number == 1:
            row["wall_time"] = double(value)
        elif number == 2:
            row["step"] = signed(value)
        elif number == 5:
            for kind, summary in fields_of(message(value)):
                if kind == 1:
                    row.update(_scalar(message(summary)))
    return row


def _scalar(summary: bytes) -> dict[str, float]:
    """Return tag and value of a summary's value; nothing for an image, a histogram and the like."""
    tag, found = "", None
    for number, value in fields_of(summary):
        if number == 1:
            tag = text(value)
        elif number == 2:
            found = single(value)
        elif number == 8:
            found = _of_tensor(message(value))
    return {} if found is None or not tag else {tag: found}


def _of_tensor(tensor: bytes) -> float | None:
    """Return the number that a tensor of one element holds; None for any other."""
    kind, content = 0, b""
    for number, value in fields_of(tensor):
        if number == 1:
            kind = signed(value)
        elif number in (4, 5, 6):
            content = _joined(content, value)
    forms = {_FLOAT: ("<f", 4), _DOUBLE: ("<d", 8)}
    if kind not in forms or len(content) != forms[kind][1]:
        return None
    return double(content) if kind == _DOUBLE else single(content)


def _joined(content: bytes, value: Value) -> bytes:
    return content + message(value)


TENSORBOARD = LogFormat(_NAME, _recognises, _read)
