"""Errors of GPUs in a kernel log, or in what NVIDIA's DCGM exporter exposes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mp_agent.errors import FlightError
from mp_agent.inputs.files import check_text, read_lines

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9A-Fa-f:.]+)\): (?P<xid>\d{1,9})")
_DCGM = re.compile(
    r'^DCGM_FI_DEV_XID_ERRORS\{[^}]*gpu="(?P<gpu>[^"]*)"[^}]*\} (?P<xid>\d{1,9})(?:\.0*)?\b'
)
_TIME = re.compile(
    r"^\[?(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
)
_LINE_CHARACTERS_MAX = 10_000
_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68})
"""XIDs that a program or its stop brings about; NVIDIA, "XID Errors"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuError:
    """An XID: which GPU, and when, if the source says so."""

    xid: int
    gpu: str
    source: str
    time_unix_seconds: float | None = None

    @property
    def of_hardware(self) -> bool:
        """Whether the number stands for faults of GPU, memory, link or driver."""
        return self.xid not in _OF_PROGRAMS


def read_gpu_errors(path: Path) -> tuple[GpuError, ...]:
    """Return the XIDs in a file, each once, in its order.

    The file holds the output of `dmesg --time-format=iso` or `journalctl -k -o short-iso` (times in
    seconds since boot are not used), or the exposition text of DCGM's exporter. Raises FlightError,
    naming the file, if it cannot be read.
    """
    try:
        check_text(path)
        return tuple(dict.fromkeys(_errors(path)))
    except OSError as error:
        raise FlightError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise FlightError(f"{path}: {error}") from error


def _errors(path: Path) -> Iterator[GpuError]:
    for _, line in read_lines(path, _LINE_CHARACTERS_MAX):
        if found := _XID.search(line):
            yield GpuError(
                xid=int(found["xid"]),
                gpu=found["gpu"],
                source="The kernel log",
                time_unix_seconds=_moment(line),
            )
        elif (found := _DCGM.search(line)) and int(found["xid"]):
            yield GpuError(xid=int(found["xid"]), gpu=found["gpu"], source="DCGM")


def _moment(line: str) -> float | None:
    """Return the time at the start of a line; a time without a zone is local."""
    found = _TIME.search(line)
    if found is None:
        return None
    text = found["time"].replace(",", ".").replace("Z", "+00:00")
    text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)
    text = re.sub(r"\.(\d+)", lambda m: "." + m[1][:6].ljust(6, "0"), text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
