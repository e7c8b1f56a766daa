"""How `mp-agent dump` asks the node agent of a run for a flight record: two small private files.

::

    <run directory>/flight-request.json    written by the command, removed by the node agent
    <run directory>/flight-answer.json     written by the node agent, removed by the command
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from mp_agent.ring.files import read_private, replace_atomically

_BYTES_MAX = 1 << 14
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRequest:
    """Somebody wants a flight record. `id` tells requests apart."""

    id: str
    requested_unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpAnswer:
    """The record that was written, or why there is none."""

    id: str
    path: str = ""
    problem: str = ""


def write_request(run_dir: Path, request: DumpRequest) -> None:
    """Ask the run's node agent. Raises OSError."""
    replace_atomically(_request_path(run_dir), msgspec.json.encode(request))


def pop_request(run_dir: Path) -> DumpRequest | None:
    """Return what is asked for, once; None when nothing is, or nothing that can be read."""
    path = _request_path(run_dir)
    if not path.exists():
        return None
    request = _read(path, DumpRequest)
    path.unlink(missing_ok=True)
    return request


def write_answer(run_dir: Path, answer: DumpAnswer) -> None:
    """Answer a request. Raises OSError."""
    replace_atomically(_answer_path(run_dir), msgspec.json.encode(answer))


def pop_answer(run_dir: Path, request: DumpRequest) -> DumpAnswer | None:
    """Return the answer to a request, once; None while there is none."""
    path = _answer_path(run_dir)
    answer = _read(path, DumpAnswer)
    if answer is None or answer.id != request.id:
        return None
    path.unlink(missing_ok=True)
    return answer


def forget_requests(run_dir: Path) -> None:
    """Remove both files: the run is over. Raises OSError."""
    _request_path(run_dir).unlink(missing_ok=True)
    _answer_path(run_dir).unlink(missing_ok=True)


def _request_path(run_dir: Path) -> Path:
    return run_dir / "flight-request.json"


def _answer_path(run_dir: Path) -> Path:
    return run_dir / "flight-answer.json"


def _read(path: Path, kind: type[_T]) -> _T | None:
    content = read_private(path, _BYTES_MAX)
    try:
        return None if content is None else msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, ValueError):
        return None
