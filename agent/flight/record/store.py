"""Flight records on disk: their number, their size, and which rows are dropped to keep it.

Stores flight records, within bounds on their number and size.
::

    <flight_dir>/<run>/<timestamp>-<reason>/node<k>.npz      one file per node

On a shared file system the nodes' files of one record share a directory. Each node applies the
bounds to its own files, and touches no other node's.
"""

import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from re import sub
from typing import TypeVar

from mp_agent.flight.record.archive import write_archive
from mp_agent.records.flight import NodeRecord, RankLog, Segment
from mp_agent.records.steps import LayerTable, StepRecord
from mp_agent.ring.files import make_private_directory, read_private, replace_atomically
from mp_agent.ring.locations import run_directory

_Row = TypeVar("_Row", StepRecord, LayerTable)

_FIXED_STEP_BYTES = 24
_FIXED_LAYER_BYTES = 16


def within(record: NodeRecord, bytes_max: int) -> NodeRecord:
    """Return the record without its oldest layer tables, then steps, within `bytes_max`.

    Sizes are before compression; tables that are equal on several ranks count once.
    """
    digests = {
        id(rows): hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
        for segment in _segments(record.ranks)
        for table in segment.tables
        for rows in table.families.values()
    }
    fixed = _names_bytes(record.ranks)
    rest = bytes_max - fixed - sum(_step_bytes(record.ranks).values())
    tables_since = _cut(_table_bytes(record.ranks, digests), rest)
    ranks = [_since(log, tables=tables_since) for log in record.ranks]
    rest = bytes_max - fixed - sum(_table_bytes(ranks, digests).values())
    steps_since = _cut(_step_bytes(ranks), rest)
    ranks = [_since(log, steps=steps_since) for log in ranks]
    left_out = _count(record.ranks) - _count(ranks)
    if not left_out:
        return record
    return replace(record, ranks=tuple(ranks), left_out=record.left_out + left_out)


def _cut(bytes_by_sequence: Mapping[int, int], bytes_max: int) -> int:
    """Return the first sequence from which everything fits; 0 if all of it does."""
    total = 0
    ascending = sorted(bytes_by_sequence)
    for sequence in reversed(ascending):
        total += bytes_by_sequence[sequence]
        if total > bytes_max:
            return sequence + 1
    return 0


def _names_bytes(ranks: Sequence[RankLog]) -> int:
    distinct = {segment.schema.layers for segment in _segments(ranks)}
    return sum(len(layer.name) + _FIXED_LAYER_BYTES for layers in distinct for layer in layers)


def _table_bytes(ranks: Sequence[RankLog], digests: Mapping[int, bytes]) -> dict[int, int]:
    found: dict[int, dict[bytes, int]] = {}
    for segment in _segments(ranks):
        for table in segment.tables:
            sizes = found.setdefault(table.sequence, {})
            sizes.update((digests[id(rows)], rows.nbytes) for rows in table.families.values())
    return {sequence: sum(sizes.values()) for sequence, sizes in found.items()}


def _step_bytes(ranks: Sequence[RankLog]) -> dict[int, int]:
    found: dict[int, int] = {}
    for segment in _segments(ranks):
        for step in segment.steps:
            size = step.values.nbytes + _FIXED_STEP_BYTES
            size += sum(rows.nbytes for rows in step.families.values())
            found[step.sequence] = found.get(step.sequence, 0) + size
    return found


def _since(log: RankLog, *, tables: int = 0, steps: int = 0) -> RankLog:
    return replace(
        log,
        segments=tuple(
            replace(
                segment,
                tables=_rows_since(segment.tables, tables),
                steps=_rows_since(segment.steps, steps),
            )
            for segment in log.segments
        ),
    )


def _rows_since(rows: tuple[_Row, ...], sequence: int) -> tuple[_Row, ...]:
    return tuple(row for row in rows if row.sequence >= sequence)


def _count(ranks: Sequence[RankLog]) -> int:
    return sum(len(segment.steps) + len(segment.tables) for segment in _segments(ranks))


def _segments(ranks: Sequence[RankLog]) -> Iterator[Segment]:
    for log in ranks:
        yield from log.segments


log = logging.getLogger("mp_agent.flight")

_FILE_MODE = 0o600
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REASON_CHARACTERS_MAX = 60
_STALE_SECONDS = 3600.0
"""An unfinished file is another writer's until then: a job of the same name, on another machine."""
_CLOCKS_APART_SECONDS = 7200.0
"""A record is named by the clock of its root agent."""
REPORT_PAGE, REPORT_DOCUMENT = "postmortem.html", "postmortem.json"
REPORT_BYTES_MAX = 1 << 24


def record_name(time_unix_seconds: float, reason: str) -> str:
    """Return the name of a record, which sorts by time and contains the reason."""
    moment = datetime.fromtimestamp(time_unix_seconds, UTC)
    milliseconds = moment.microsecond // 1000
    legible = sub(r"[^A-Za-z0-9]+", "-", reason)[:_REASON_CHARACTERS_MAX].strip("-") or "unnamed"
    return f"{moment:%Y%m%dT%H%M%S}.{milliseconds:03d}Z-{legible}"


def write_report(record: Path, page: str, document: str) -> None:
    """Write the post-mortem of a record into its directory. Raises OSError."""
    for name, text in ((REPORT_PAGE, page), (REPORT_DOCUMENT, document)):
        replace_atomically(record / name, text.encode("utf-8", "replace"))


def newest_report(flight_dir: Path, run: str, name: str) -> bytes | None:
    """Return the newest post-mortem of a run, `REPORT_PAGE` or `REPORT_DOCUMENT`; None without one.

    One that another user wrote, or that is too large, counts as none.
    """
    found = records_directory(flight_dir, run).glob(f"*/{name}")
    for path in sorted(found, key=_age, reverse=True):
        if (content := read_private(path, REPORT_BYTES_MAX)) is not None:
            return content
    return None


def _age(path: Path) -> tuple[bool, str]:
    """Return what sorts the files of records by their age.

    A time that is still to come is of a clock that has been set back since: those are the oldest.
    """
    name = path.parent.name
    return name < record_name(time.time() + _CLOCKS_APART_SECONDS, ""), name


def records_directory(flight_dir: Path, run: str) -> Path:
    """Return the directory of all records of a run."""
    return run_directory(flight_dir, run)


def write_record(flight_dir: Path, record: NodeRecord, *, records_max: int, bytes_max: int) -> Path:
    """Write a node's record, remove older ones beyond the bounds, and return its file.

    The file gets its name once it is complete. Raises OSError when it cannot be written, RingError
    when its directory belongs to another user; then no part of it remains, and older records stay.
    """
    run_dir = records_directory(flight_dir, record.run)
    directory = run_dir / record.request.name
    file = f"node{record.node_rank}.npz"
    _make_directory(directory)
    hidden = directory / f".{file}.{os.getpid()}"
    try:
        hidden.unlink(missing_ok=True)
        with os.fdopen(os.open(hidden, _FLAGS, _FILE_MODE), "wb") as opened:
            write_archive(opened, within(record, bytes_max))
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(hidden, directory / file)
    except BaseException:
        hidden.unlink(missing_ok=True)
        _remove_empty(directory)
        _remove_empty(run_dir)
        raise
    _prune(run_dir, file, keep=directory, records_max=records_max, bytes_max=bytes_max)
    return directory / file


def _make_directory(directory: Path) -> None:
    """Make the directory; below a world-writable one, all of it must belong to this user."""
    if any(_writable_by_all(above) for above in directory.parents):
        make_private_directory(directory)
    else:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _writable_by_all(directory: Path) -> bool:
    try:
        return bool(directory.stat().st_mode & stat.S_IWOTH)
    except FileNotFoundError:
        return False


def _prune(run_dir: Path, file: str, *, keep: Path, records_max: int, bytes_max: int) -> None:
    """Remove this node's oldest files until the rest is within the bounds."""
    with suppress(OSError):
        for unfinished in run_dir.glob(f"*/.{file}.*"):
            if time.time() - unfinished.stat().st_mtime > _STALE_SECONDS:
                unfinished.unlink(missing_ok=True)
    found = sorted(run_dir.glob(f"*/{file}"), key=_age)
    sizes = {path: _size(path) for path in found}
    for path in found:
        if len(sizes) <= max(records_max, 1) and sum(sizes.values()) <= bytes_max:
            return
        if path.parent == keep:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("flight record %s cannot be removed: %s", path, error.strerror)
            continue
        del sizes[path]
        _remove_report(path.parent)
        _remove_empty(path.parent)


def _remove_report(directory: Path) -> None:
    """Remove the post-mortem of a record of which no node's file is left."""
    with suppress(OSError):
        if not any(directory.glob("node*.npz")):
            for name in (REPORT_PAGE, REPORT_DOCUMENT):
                (directory / name).unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
