"""Lines of a printed log: their time stamps, and runs of `name=value` or `name: value`."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from mp_agent.inputs.files import read_lines

LINE_CHARACTERS_MAX = 20_000
"""A longer line holds no step of a trainer; a progress bar may."""
_STATES_CHARACTERS_MAX = 1 << 24
"""Of all states of a progress bar."""

NUMBER = (
    r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|NAN|inf|Inf|INF|Infinity)"
)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line; of a progress bar, each state. Raises OSError."""
    for number, line in read_lines(path, _STATES_CHARACTERS_MAX):
        for part in line.split("\r"):
            if part and len(part) <= LINE_CHARACTERS_MAX:
                yield number, _ESCAPES.sub("", part)


def stamp(line: str) -> float | None:
    """Return the time that a line bears near its beginning, as Unix seconds; None without one."""
    found = _STAMP.search(line, 0, 120)
    if found is None:
        return None
    date, clock, fraction = found.groups()
    try:
        # Without a zone it is only compared with other lines.
        seconds = datetime.fromisoformat(f"{date}T{clock}+00:00").timestamp()
    except ValueError:
        return None
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)
