"""Signals: numbers per run that a condition looks at, taken from catalog metrics."""

from dataclasses import dataclass
from typing import Literal

from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions import Expression
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.thresholds import THRESHOLDS, Threshold
from mp_agent.errors import CatalogError


@dataclass(frozen=True, slots=True)
class Signal(Expression):
    """A number per run, or none."""

    def __truediv__(self, other: "Signal") -> "Arithmetic":
        return Arithmetic(self, "/", other)

    def __mul__(self, other: "Signal") -> "Arithmetic":
        return Arithmetic(self, "*", other)

    def __add__(self, other: "Signal") -> "Arithmetic":
        return Arithmetic(self, "+", other)

    def __sub__(self, other: "Signal") -> "Arithmetic":
        return Arithmetic(self, "-", other)


@dataclass(frozen=True, slots=True)
class Limit(Signal):
    """A threshold's value."""

    threshold: Threshold


def limit(name: str) -> Limit:
    """Return the threshold called `name`; CatalogError when there is none."""
    for threshold in THRESHOLDS:
        if threshold.name == name:
            return Limit(threshold)
    raise CatalogError(f"{name!r} names no threshold")


@dataclass(frozen=True, slots=True)
class Number(Signal):
    """A constant that is part of a condition's meaning, such as 1 for true."""

    value: float


@dataclass(frozen=True, slots=True)
class Length(Signal):
    """A duration in seconds."""

    duration: Duration


@dataclass(frozen=True, slots=True)
class Where:
    """A label matcher; a threshold as value stands for its label text."""

    label: str
    operator: Literal["=", "!=", "=~", "!~"]
    value: str | Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Series(Signal):
    """The series of one metric, made one per run by `aggregate`.

    over: the PromQL function and the range that it is first applied to, per series; else the
    present value is taken. arguments: of that function, in front of the range.
    before: how long ago, added up. keep: labels that stay beside those of the run.
    """

    metric: Metric
    aggregate: Literal["max", "min"] = "max"
    over: tuple[str, Duration] | None = None
    arguments: tuple[float, ...] = ()
    before: tuple[Duration, ...] = ()
    where: tuple[Where, ...] = ()
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(Signal):
    """How often a counter's event happened within a `window` that ended `before` ago.

    A counter first seen within the window counts from 0 rather than from its first value, since a
    run may be scraped for the first time after the event. First seen means: not within
    `birth_window` before, else one failed scrape would bring back the events of days ago.
    """

    metric: Metric
    window: Duration
    before: tuple[Duration, ...] = ()
    where: tuple[Where, ...] = ()


@dataclass(frozen=True, slots=True)
class Mean(Signal):
    """The mean of all that a histogram has observed."""

    metric: Metric


@dataclass(frozen=True, slots=True)
class Arithmetic(Signal):
    """Two signals of the same run, combined; a Limit, Number or Length may stand for either."""

    left: Signal
    operator: Literal["+", "-", "*", "/"]
    right: Signal


@dataclass(frozen=True, slots=True)
class Either(Signal):
    """The first signal where the run has it, else the second."""

    first: Signal
    second: Signal
