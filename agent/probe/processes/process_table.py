"""Information on processes from `/proc`, which may be missing."""

import os
from collections.abc import Iterator
from pathlib import Path

_ANCESTORS_MAX = 32
_PARENT_FIELD, _START_FIELD = 1, 19
"""Of /proc/<pid>/stat, counted after the name."""


def boot_id() -> str:
    """Return the boot id of the machine; "" where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def start_ticks(pid: int) -> str:
    """Return when a process was started; "" when that cannot be known."""
    return _stat_field(pid, _START_FIELD)


def ancestors() -> Iterator[int]:
    """Yield the process ids above this one, the parent first, as far as they can be seen."""
    pid = os.getppid()
    for _ in range(_ANCESTORS_MAX):
        if pid <= 0:
            return
        yield pid
        pid = int(_stat_field(pid, _PARENT_FIELD) or 0)


def _stat_field(pid: int, field: int) -> str:
    """Return a field of /proc/<pid>/stat; its name may itself hold spaces and parentheses."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[field]
    except (OSError, IndexError):
        return ""
