"""What is in force when conditions are rendered or judged: thresholds, durations, severities."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

from mp_agent.alerting.durations import BY_NAME, DURATIONS, Duration, prometheus_duration
from mp_agent.catalog.thresholds import BY_NAME as BY_THRESHOLD_NAME
from mp_agent.catalog.thresholds import DEFAULTS, Threshold, bound_label, resolve
from mp_agent.errors import CatalogError, SettingError, unknown_name


class Severity(Enum):
    """Label `severity` of an alert, worst first; a worse one mutes the milder of the same run."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


SELECTORS: Mapping[str, str] = {"series": "", "targets": 'job=~".*mp-agent.*"'}
"""Label matchers by what they select: mp_agent's own series (all), and the targets that are pods or
hosts which opted in, by the labels that the scraper gives them."""

SeverityChanges = Mapping[str, Mapping[Severity, Severity | None]]
"""Condition → its own severity → the one to have instead; None: it is not judged."""

_MARK = re.compile(r"<(\w+)>")
_MATCHER = r'[a-zA-Z_]\w*(?:=~|!~|!=|=)"(?:[^"\\\n]|\\.)*"'
MATCHERS = rf"(?:{_MATCHER}(?:,{_MATCHER})*)?"
"""Pattern of what a selector may be: label matchers, separated by commas, or nothing."""


@dataclass(frozen=True, slots=True)
class Values:
    """Every threshold and duration by name, overrides and time scale applied.

    Also what a site has changed of severities and selectors.
    """

    limits: Mapping[str, float]
    seconds: Mapping[str, float]
    time_scale: float = 1.0
    """What the durations have been multiplied by."""
    severities: SeverityChanges = field(default_factory=dict)
    selectors: Mapping[str, str] = field(default_factory=lambda: SELECTORS)

    def limit(self, threshold: Threshold) -> float:
        """Return a threshold's value."""
        return self.limits[threshold.name]

    def limit_text(self, threshold: Threshold) -> str:
        """Return a threshold as an expression writes it."""
        return number_text(self.limit(threshold))

    def bound_text(self, threshold: Threshold) -> str:
        """Return a threshold as label values and descriptions write it."""
        return bound_label(self.limit(threshold))

    def length_text(self, duration: Duration) -> str:
        """Return a duration's seconds as an expression writes them."""
        return number_text(round(self.seconds[duration.name], 3))

    def duration(self, *durations: Duration) -> str:
        """Return the sum of durations as Prometheus writes it."""
        return prometheus_duration(sum(self.seconds[part.name] for part in durations))

    def severity(self, condition: str, severity: Severity) -> Severity | None:
        """Return the severity that a level of a condition has here; None: it is off."""
        return self.severities.get(condition, {}).get(severity, severity)

    def fill(self, text: str) -> str:
        """Return `text` with each `<name>` of a threshold or duration replaced by its value."""
        return _MARK.sub(lambda mark: self._text(mark[1]), text)

    def _text(self, name: str) -> str:
        if name in BY_NAME:
            return self.duration(BY_NAME[name])
        return self.bound_text(BY_THRESHOLD_NAME[name])


@dataclass(frozen=True, slots=True)
class MarkedValues(Values):
    """Values of which every number is a mark, for who fills them in later, as the chart does.

    `@name@`: a threshold; `@a+b@`: durations added up; `@a#@`: a duration in seconds.
    """

    def limit_text(self, threshold: Threshold) -> str:
        """Return a threshold's mark."""
        return f"@{threshold.name}@"

    def bound_text(self, threshold: Threshold) -> str:
        """Return a threshold's mark."""
        return f"@{threshold.name}@"

    def length_text(self, duration: Duration) -> str:
        """Return a duration's mark."""
        return f"@{duration.name}#@"

    def duration(self, *durations: Duration) -> str:
        """Return the mark of a sum of durations."""
        return f"@{'+'.join(part.name for part in durations)}@"


def values_in_force(
    thresholds: Mapping[str, float] | None = None,
    durations: Mapping[str, float] | None = None,
    *,
    severities: SeverityChanges | None = None,
    selectors: Mapping[str, str] | None = None,
    time_scale: float = 1.0,
) -> Values:
    """Return the defaults with overrides by name; every duration is multiplied by `time_scale`.

    An unknown name and a value that is not above 0 raise SettingError; `site` checks the names of
    conditions.
    """
    if not (isfinite(time_scale) and time_scale > 0):
        raise SettingError(f"time scale has value {time_scale!r}; it must be above 0")
    for name, value in (durations or {}).items():
        if name not in BY_NAME:
            raise SettingError(f"durations: {unknown_name(name, BY_NAME)}")
        if not (isfinite(value) and value > 0):
            raise SettingError(f"durations: {name} has value {value!r}; it must be above 0")
    for name, text in (selectors or {}).items():
        if name not in SELECTORS:
            raise SettingError(f"selectors: {unknown_name(name, SELECTORS)}")
        if not re.fullmatch(MATCHERS, text):
            raise SettingError(
                f"selectors: {name} has value {text!r}; write label matchers such as "
                'cluster="a",namespace=~"ml-.*"'
            )
    seconds = {known.name: known.seconds for known in DURATIONS} | dict(durations or {})
    for known in DURATIONS:
        if known.below and seconds[known.name] >= seconds[known.below]:
            raise SettingError(
                f"durations: {known.name} has value {prometheus_duration(seconds[known.name])}; it "
                f"must be below {known.below}, which is "
                f"{prometheus_duration(seconds[known.below])}, or one of the alerts is blind"
            )
    return Values(
        limits=resolve(thresholds or {}),
        seconds={name: value * time_scale for name, value in seconds.items()},
        time_scale=time_scale,
        severities=severities or {},
        selectors={**SELECTORS, **(selectors or {})},
    )


def number_text(value: float) -> str:
    """Return a number exactly, a whole one without a point."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def check_marks(owner: str, text: str) -> None:
    """Raise CatalogError when `text` of `owner` has a `<name>` that is no threshold or duration."""
    for name in _MARK.findall(text):
        if name not in DEFAULTS and name not in BY_NAME:
            raise CatalogError(f"{owner}: <{name}> names no threshold and no duration")
