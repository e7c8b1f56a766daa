"""Finds and reads the flight records at a path."""

from collections.abc import Iterable
from pathlib import Path

from mp_agent.errors import FlightError
from mp_agent.flight.record.archive import read_archive
from mp_agent.flight.record.evidence import Evidence, gather
from mp_agent.records.flight import NodeRecord

_PATTERN = "node*.npz"
_FILES_MAX = 20_000


def load(path: Path) -> Evidence:
    """Return the evidence at `path`: a node's file, a record's directory, or all records of a run.

    Raises FlightError, naming the path, when there is none or it cannot be read. Of several files,
    those that cannot be read are noted and skipped, as long as one can.
    """
    if not path.exists():
        raise FlightError(f"{path}: no such file or directory")
    if path.is_dir():
        return _load_directory(path)
    evidence = gather(path, [read_archive(path)])
    if evidence is None:
        raise FlightError(f"{path}: the record holds no rank")
    return evidence


def _load_directory(path: Path) -> Evidence:
    try:
        files = sorted(path.glob(_PATTERN)) or sorted(path.glob(f"*/{_PATTERN}"))
        deeper = bool(files) or any(path.glob(f"*/*/{_PATTERN}"))
    except OSError as error:
        raise FlightError(f"{path}: {error.strerror}") from error
    if not files and deeper:
        raise FlightError(f"{path}: holds the records of several runs; name one of them")
    if not files:
        raise FlightError(f"{path}: holds no flight record and no ring")
    records, problems = _read_all(files)
    if not records:
        raise FlightError(problems[0])
    evidence = gather(path, records, problems)
    if evidence is None:
        raise FlightError(f"{path}: the records hold no rank")
    return evidence


def _read_all(files: Iterable[Path]) -> tuple[list[NodeRecord], list[str]]:
    records, problems = [], []
    for number, file in enumerate(files):
        if number >= _FILES_MAX:
            problems.append(f"{file}: it and further files are not read: more than {_FILES_MAX}")
            break
        try:
            records.append(read_archive(file))
        except FlightError as error:
            problems.append(str(error))
    return records, problems
