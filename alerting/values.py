"""The numbers in force when conditions are rendered: thresholds, and durations in seconds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from mp_agent.alerting.durations import (
    BY_NAME,
    DURATIONS,
    Duration,
    parse_seconds,
    prometheus_duration,
)
from mp_agent.catalog.thresholds import DEFAULTS, Threshold, bound_label, resolve
from mp_agent.errors import CatalogError, SettingError

_MARK = re.compile(r"<(\w+)>")


@dataclass(frozen=True, slots=True)
class Values:
    """Every threshold and every duration by name, overrides and time scale applied."""

    limits: Mapping[str, float]
    seconds: Mapping[str, float]
    time_scale: float = 1.0
    """What the durations have been multiplied by."""

    def limit(self, threshold: Threshold) -> float:
        """Return a threshold's value."""
        return self.limits[threshold.name]

    def duration(self, *durations: Duration) -> str:
        """Return the sum of durations as Prometheus writes it."""
        return prometheus_duration(sum(self.seconds[part.name] for part in durations))

    def fill(self, text: str) -> str:
        """Return `text` with each `<name>` of a threshold or duration replaced by its value."""
        return _MARK.sub(lambda mark: self._text(mark[1]), text)

    def _text(self, name: str) -> str:
        if name in self.limits:
            return bound_label(self.limits[name])
        return self.duration(BY_NAME[name])


def values_in_force(
    thresholds: Mapping[str, float] | None = None,
    durations: Mapping[str, float] | None = None,
    *,
    time_scale: float = 1.0,
) -> Values:
    """Return the defaults with overrides by name; every duration is multiplied by `time_scale`.

    An unknown name and a value that is not above 0 raise SettingError.
    """
    if not (isfinite(time_scale) and time_scale > 0):
        raise SettingError(f"time scale has value {time_scale!r}; it must be above 0")
    for name, value in (durations or {}).items():
        if name not in BY_NAME:
            raise SettingError(f"durations: {name!r} is unknown; known: {', '.join(BY_NAME)}")
        if not (isfinite(value) and value > 0):
            raise SettingError(f"durations: {name} has value {value!r}; it must be above 0")
    seconds = {known.name: known.seconds for known in DURATIONS} | dict(durations or {})
    return Values(
        limits=resolve(thresholds or {}),
        seconds={name: value * time_scale for name, value in seconds.items()},
        time_scale=time_scale,
    )


def parse_assignments(texts: tuple[str, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the thresholds and the durations (in seconds) that `NAME=VALUE` texts set."""
    thresholds: dict[str, float] = {}
    durations: dict[str, float] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise SettingError(f"{text!r} sets nothing; write NAME=VALUE")
        if name in BY_NAME:
            durations[name] = parse_seconds(name, value)
        elif name in DEFAULTS:
            thresholds[name] = _number(name, value)
        else:
            raise SettingError(f"{name!r} is unknown; known: {', '.join((*DEFAULTS, *BY_NAME))}")
    return thresholds, durations


def check_marks(owner: str, text: str) -> None:
    """Raise CatalogError when `text` of `owner` has a `<name>` that is no threshold or duration."""
    for name in _MARK.findall(text):
        if name not in DEFAULTS and name not in BY_NAME:
            raise CatalogError(f"{owner}: <{name}> names no threshold and no duration")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(f"{name} has value {text!r}; it must be a number") from None
