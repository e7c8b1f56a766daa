"""Durations as text: as Prometheus writes them, and as settings give them."""

import re

from mp_agent.errors import SettingError

_UNIT_MILLISECONDS = (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_PARTS = re.compile(rf"(?:{_PART.pattern})+")


def prometheus_duration(seconds: float) -> str:
    """Return seconds as Prometheus writes them, to the millisecond: `1h30m`, `10s`, `250ms`."""
    rest = max(1, round(seconds * 1000))
    words = []
    for unit, milliseconds in _UNIT_MILLISECONDS:
        count, rest = divmod(rest, milliseconds)
        if count:
            words.append(f"{count}{unit}")
    return "".join(words)


def parse_seconds(name: str, text: str) -> float:
    """Return the seconds in `90`, `1m30s` or `250ms`; anything else is refused, naming `name`."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _PARTS.fullmatch(text):
        raise SettingError(f"{name} has value {text!r}; give seconds, or 10m, 1m30s, 250ms")
    milliseconds = dict(_UNIT_MILLISECONDS)
    return sum(float(number) * milliseconds[unit] / 1000 for number, unit in _PART.findall(text))
