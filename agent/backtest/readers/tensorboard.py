"""Reads TensorBoard's and W&B's own files.

Weights & Biases: the `.wandb` file of a run, which it writes online and offline alike.
What its website exports is CSV, and `run.history()` and `scan_history()` give tables; those are
read as such.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mp_agent.backtest.log.columns import Row
from mp_agent.backtest.log.rows import Problems
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import ROWS_MAX, LogFormat, bounded_rows, log_of_rows
from mp_agent.errors import LogError, SourceError
from mp_agent.inputs.files import open_regular, parse_json

Value = int | bytes


class WireError(ValueError):
    """A message breaks off, or holds what no message can hold."""


def fields_of(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field: integers, and bytes of all else. Raises WireError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value: Value
            value, at = _varint(message, at)
        elif kind in (1, 2, 5):
            length = {1: 8, 5: 4}.get(kind)
            if length is None:
                length, at = _varint(message, at)
            value = message[at : at + length]
            if len(value) < length:
                raise WireError("a field breaks off")
            at += length
        else:
            raise WireError(f"a field has wire type {kind}")
        yield number, value


def double(value: Value) -> float:
    """Return a fixed 64-bit field as a float. Raises WireError for another field."""
    return _unpacked("<d", value)


def single(value: Value) -> float:
    """Return a fixed 32-bit field as a float. Raises WireError for another field."""
    return _unpacked("<f", value)


def signed(value: Value) -> int:
    """Return a varint field as a signed 64-bit integer. Raises WireError for another field."""
    if not isinstance(value, int):
        raise WireError("a field has another type")
    return value - (1 << 64) if value >= 1 << 63 else value


def text(value: Value) -> str:
    """Return a field as text. Raises WireError for a number."""
    return message(value).decode("utf-8", "replace")


def message(value: Value) -> bytes:
    """Return a field as a message. Raises WireError for a number."""
    if isinstance(value, int):
        raise WireError("a field has another type")
    return value


def _unpacked(form: str, value: Value) -> float:
    try:
        (number,) = struct.unpack(form, message(value))
    except struct.error as error:
        raise WireError("a field has another length") from error
    return float(number)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while shift < 70:
        if at >= len(message):
            raise WireError("a number breaks off")
        byte = message[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & (1 << 64) - 1, at
        shift += 7
    raise WireError("a number is too long")


_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_entry(byte) for byte in range(256))


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of a few bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


_TENSORBOARD_NAME = "tensorboard"
_PATTERN = "*tfevents*"
_TENSORBOARD_RECORD_BYTES_MAX = 1 << 26
_FLOAT, _DOUBLE = 1, 2
"""Values of TensorFlow's DataType."""


def _recognises_tensorboard(path: Path, head: bytes) -> bool:
    return "tfevents" in path.name if path.is_file() else any(path.glob(_PATTERN))


def _read_tensorboard(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    files = [path] if path.is_file() else sorted(path.glob(_PATTERN))
    problems = Problems("record")
    rows = bounded_rows(row for file in files for row in _rows(file, problems))
    if not rows:
        raise LogError("; ".join(problems.messages()) or "holds no scalar")
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    return [log_of_rows(path, _TENSORBOARD_NAME, rows, options, name=name, problems=problems)]


def _rows(path: Path, problems: Problems) -> Iterator[Row]:
    with open_regular(path) as file:
        for number, record in enumerate(_records_tensorboard(file, problems), start=1):
            try:
                scalars = _scalars(record)
            except WireError as error:
                problems.add(number, str(error))
                continue
            if len(scalars) > 2:
                yield number, scalars


def _records_tensorboard(file: BinaryIO, problems: Problems) -> Iterator[bytes]:
    """Yield the records of a file up to its end, or to where it is damaged."""
    number = 1
    while header := file.read(12):
        # A process that is still writing, or that was killed, leaves the last one incomplete.
        if len(header) < 12:
            problems.add(number, "breaks off")
            return
        length, crc = struct.unpack("<QI", header)
        if masked_crc32c(header[:8]) != crc or length > _TENSORBOARD_RECORD_BYTES_MAX:
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
    """Return tag and value of a summary's value; nothing for an image, a histogram or similar."""
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


TENSORBOARD = LogFormat(_TENSORBOARD_NAME, _recognises_tensorboard, _read_tensorboard)


_WANDB_NAME = "wandb"
_MAGIC = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 32_768
_WANDB_RECORD_BYTES_MAX = 1 << 26
_PIECE = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _RUN = 2, 17
"""Fields of wandb_internal.Record."""


def _recognises_wandb(path: Path, head: bytes) -> bool:
    return head.startswith(_MAGIC)


def _read_wandb(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    problems = Problems("record")
    rows: list[Row] = []
    name = ""
    with open_regular(path) as file:
        for number, record in enumerate(_records_wandb(file, problems), start=1):
            try:
                for kind, value in fields_of(record):
                    if kind == _HISTORY:
                        rows.append((number, _history(message(value))))
                    elif kind == _RUN:
                        name = _display_name(message(value)) or name
            except (WireError, SourceError) as error:
                problems.add(number, str(error))
            if len(rows) > ROWS_MAX:
                raise LogError(f"holds more than {ROWS_MAX} rows")
    if not rows:
        raise LogError("; ".join(problems.messages()) or "holds no history")
    return [log_of_rows(path, _WANDB_NAME, rows, options, name=name, problems=problems)]


def _records_wandb(file: BinaryIO, problems: Problems) -> Iterator[bytes]:
    """Yield the records of a LevelDB log; the last one may be incomplete."""
    at, pieces, number = _HEADER_BYTES, bytearray(), 1
    while block := file.read(_BLOCK_BYTES):
        while at + _PIECE.size <= len(block):
            _, length, kind = _PIECE.unpack_from(block, at)
            at += _PIECE.size
            piece = block[at : at + length]
            at += length
            if len(piece) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
                if length or kind:
                    problems.add(number, "breaks off or is damaged")
                return
            if kind in (_FULL, _FIRST):
                pieces.clear()
            pieces += piece
            if len(pieces) > _WANDB_RECORD_BYTES_MAX:
                problems.add(number, "is longer than any; the rest of the file is not read")
                return
            if kind in (_FULL, _LAST):
                yield bytes(pieces)
                number += 1
        at = 0


def _history(record: bytes) -> dict[str, Any]:
    """Return the values of one call of `log` by name; of nested ones with dots."""
    row: dict[str, Any] = {}
    for number, value in fields_of(record):
        if number == 1:
            row.update(_item(message(value)))
        elif number == 2:
            steps = [one for kind, one in fields_of(message(value)) if kind == 1]
            row["_step"] = signed(steps[0]) if steps else 0
    return row


def _item(record: bytes) -> dict[str, Any]:
    names, content = [], ""
    for number, value in fields_of(record):
        if number in (1, 2):
            names.append(text(value))
        elif number == 16:
            content = text(value)
    if not names or not content:
        return {}
    return {".".join(names): parse_json(content)}


def _display_name(record: bytes) -> str:
    """Return the name of a RunRecord, else its id."""
    found = {number: value for number, value in fields_of(record) if number in (1, 8)}
    for number in (8, 1):
        value = found.get(number)
        if isinstance(value, bytes) and value:
            return text(value)
    return ""


WANDB = LogFormat(_WANDB_NAME, _recognises_wandb, _read_wandb)
