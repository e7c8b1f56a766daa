"""Weights & Biases: the `.wandb` file of a run, which it writes online and offline alike.

What its website exports is CSV, and `run.history()` and `scan_history()` give tables; those are
read as such.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mp_agent.backtest.log.rows import Problems, Row
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.encoding.protobuf import WireError, fields_of, message, signed, text
from mp_agent.backtest.readers.format import ROWS_MAX, LogFormat, log_of_rows
from mp_agent.errors import LogError, SourceError
from mp_agent.inputs.files import open_regular
from mp_agent.inputs.texts import parse_json

_NAME = "wandb"
_MAGIC = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 32_768
_RECORD_BYTES_MAX = 1 << 26
_PIECE = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _RUN = 2, 17
"""Fields of wandb_internal.Record."""


def _recognises(path: Path, head: bytes) -> bool:
    return head.startswith(_MAGIC)


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    problems = Problems("record")
    rows: list[Row] = []
    name = ""
    with open_regular(path) as file:
        for number, record in enumerate(_records(file, problems), start=1):
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
    return [log_of_rows(path, _NAME, rows, options, name=name, problems=problems)]


def _records(file: BinaryIO, problems: Problems) -> Iterator[bytes]:
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
            if len(pieces) > _RECORD_BYTES_MAX:
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


WANDB = LogFormat(_NAME, _recognises, _read)
