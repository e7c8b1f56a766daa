"""Request and answer files with which `mp-agent dump` gets a flight record from a node agent.

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
    """A request for a flight record. `id` is unique per request."""

    id: str
    requested_unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpAnswer:
    """The path of the record, or why there is none."""

    id: str
    path: str = ""
    problem: str = ""


def write_request(run_dir: Path, request: DumpRequest) -> None:
    """Send a request to the run's node agent. Raises OSError."""
    replace_atomically(_request_path(run_dir), msgspec.json.encode(request))


def pop_request(run_dir: Path) -> DumpRequest | None:
    """Return and remove the pending request; None if there is none that can be read."""
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
    """Return and remove the answer to a request; None while there is none."""
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
