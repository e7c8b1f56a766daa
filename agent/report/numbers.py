"""Values as texts, with their units: one form for each kind, wherever it is shown."""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite, isnan

NONE = "–"
"""Stands for a value that there is not."""

_WHOLE_MAX = 1e7
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with some digits, a whole one in full."""
    if value is None:
        return NONE
    if isfinite(value) and abs(value) < _WHOLE_MAX and value == int(value):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def scientific(value: float | None) -> str:
    """Return a number with three digits, however small or large."""
    if value is None or isnan(value):
        return NONE
    if not isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def percent(ratio: float) -> str:
    """Return a share, without pretending that a small one is none."""
    if ratio == 0:
        return "0 %"
    if ratio < 1e-4:
        return "< 0.01 %"
    return f"{100 * ratio:.2f} %" if ratio < 0.01 else f"{100 * ratio:.3g} %"


def size(count_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    value, unit = float(count_bytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units: `2 h 5 min`."""
    rest, words = round(seconds), []
    for unit, length in _TIMES:
        count, rest = divmod(rest, length)
        if count:
            words.append(f"{count} {unit}")
    return " ".join(words[:2]) or "0 s"


def moment(time_unix_seconds: float | None) -> str:
    """Return a time in UTC."""
    if time_unix_seconds is None:
        return NONE
    return f"{datetime.fromtimestamp(time_unix_seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 file`, `2 files`, `3 entries`."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("ry") else f"{count} {noun}s"


def finite(values: Sequence[float | None]) -> list[float | None]:
    """Return the values, with None for those that are not finite."""
    return [value if value is not None and isfinite(value) else None for value in values]
