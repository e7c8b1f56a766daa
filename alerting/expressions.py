"""Terms of expressions: signals, comparisons of them, and what is required of both.

Expressions: nodes that say, as plain data, what a condition looks at.
They are values, not text, because more than one reader takes them: `promql` renders them as rules,
and whatever else is derived from a condition can interpret or `walk` them likewise.

Signals: numbers per run that a condition looks at, taken from catalog metrics.
The nodes here and in `predicates` are all there are, and each says what it means without speaking
of a query language: `promql` renders them as rules, the detectors work them out in the process, and
both must come to the same result.

A signal has one value per run, or none: where a series was not seen within the range of time, and
where a division is by zero. A present value is the last one within `scrape_gap`: a scrape that
fails interrupts nothing. With `keep` it has one per run and value of those
labels.

Predicates: the runs for which something holds. Their value is that of the first signal.
With `signals` these are all nodes there are. A predicate over a signal without a value does not
hold. Where a signal keeps labels, each value of them is judged by itself, and goes by the run when
it is joined with a predicate that keeps others.
"""

import re
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

from mp_agent.alerting.durations import Duration
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.thresholds import THRESHOLDS, Threshold
from mp_agent.errors import CatalogError


@dataclass(frozen=True, slots=True)
class Expression:
    """A signal (a number per run) or a predicate (the runs for which something holds)."""


# Each reader of the catalog asks this of every node.
@cache
def walk(expression: Expression) -> tuple[Expression, ...]:
    """Return `expression` and all expressions below it."""
    found = [expression]
    for field in fields(expression):
        value = getattr(expression, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Expression):
                found += walk(part)
    return tuple(found)


Function = Literal[
    "min_over_time",
    "max_over_time",
    "avg_over_time",
    "stddev_over_time",
    "last_over_time",
    "present_over_time",
    "changes",
    "resets",
]
"""What may be made of one series' samples within a range that ends now (or `before` ago):
smallest, largest, mean and standard deviation (of the population) of them; the last; 1 if there is
any; how often a sample differs from the one before it; how often it is lower. No sample: nothing.
"""

_RECORDED_NAME = re.compile(r"[a-z_]+:mp_agent_[a-z0-9_]+:[a-z0-9_]+")


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
    """The series of one metric that match `where`, made one per run by `aggregate`.

    over: the function and the range that it is first applied to, per series; else the last value
    within `scrape_gap` is taken. before: how long ago all this was, added up.
    keep: labels that stay in addition to those of the run: one value for each of their values.
    Series with an optional label, such as those of further optimizers, are left alone unless
    `where` or `keep` names it.
    """

    metric: Metric
    aggregate: Literal["max", "min"] = "max"
    over: tuple[Function, Duration] | None = None
    before: tuple[Duration, ...] = ()
    where: tuple[Where, ...] = ()
    keep: tuple[str, ...] = ()

    @property
    def matchers(self) -> tuple[Where, ...]:
        """What the series must match."""
        return _matchers(self.metric, self.where, self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(Signal):
    """How often a counter's event happened within a `window` that ended `before` ago.

    All series of the run that match `where` are added up, but for those with an optional label
    that it does not name; there is none when none was there within the window. Of series that
    differ only in labels that the scraper gave them, the one that rose most counts: they are one
    series scraped twice, or of a target that moved.

    A counter that was not there when the window began counts from 0 rather than from its first
    value, since a run may be scraped for the first time after the event; but only while its node
    agent has been counting for less than the window, by its own account: what an older one has
    counted may have happened at any time, and a Prometheus that starts empty, a target under
    another address or a failed scrape would bring back the events of days ago.
    """

    metric: Metric
    window: Duration
    before: tuple[Duration, ...] = ()
    where: tuple[Where, ...] = ()

    @property
    def matchers(self) -> tuple[Where, ...]:
        """What the series must match."""
        return _matchers(self.metric, self.where)

    @property
    def labels(self) -> tuple[str, ...]:
        """The metric's own labels, besides the run, by whose values series are added up."""
        fixed = {matcher.label for matcher in self.matchers if matcher.operator == "="}
        return tuple(label for label in self.metric.label_names[1:] if label not in fixed)


@dataclass(frozen=True, slots=True)
class Recorded(Signal):
    """A signal that several conditions look at: its value, under a name of its own.

    Prometheus works it out once, in a recording rule of this name (`level:metric:operations`) in
    the group of those conditions. Elsewhere it is the signal itself. It has no range and no
    `before`, since what was recorded does not reach back to before the rule.
    """

    name: str
    signal: Signal

    def __post_init__(self) -> None:
        if not _RECORDED_NAME.fullmatch(self.name):
            raise CatalogError(f"{self.name}: a recorded signal is level:metric:operations")


@dataclass(frozen=True, slots=True)
class Arithmetic(Signal):
    """Two signals of the same run, combined; a Limit, Number or Length may stand for either.

    Where one has no value, or the divisor is 0, there is none.
    """

    left: Signal
    operator: Literal["+", "-", "*", "/"]
    right: Signal


@dataclass(frozen=True, slots=True)
class Either(Signal):
    """The first signal where the run has it, else the second."""

    first: Signal
    second: Signal


def _matchers(
    metric: Metric, where: tuple[Where, ...], keep: tuple[str, ...] = ()
) -> tuple[Where, ...]:
    named = {*keep, *(matcher.label for matcher in where)}
    absent = tuple(Where(label, "=", "") for label in metric.optional_labels if label not in named)
    return (*where, *absent)


@dataclass(frozen=True, slots=True)
class Predicate(Expression):
    """The runs for which something holds."""


@dataclass(frozen=True, slots=True)
class Compare(Predicate):
    """Runs that have both signals and whose left one compares so with the right one."""

    left: Signal
    operator: Literal["<", "<=", ">", ">=", "==", "!="]
    right: Signal


@dataclass(frozen=True, slots=True)
class Seen(Predicate):
    """Runs that have the signal, whatever its value."""

    signal: Signal


@dataclass(frozen=True, slots=True)
class Gone(Predicate):
    """Runs whose metric was 1 when last seen, within `window`, at a target that does not fail.

    A target that is still listed but cannot be scraped (`up` is 0) says nothing about the run.
    Only a scraper can detect this: inside the node agent it never holds by itself.
    """

    metric: Metric
    window: Duration


@dataclass(frozen=True, slots=True)
class Unreachable(Predicate):
    """Runs whose metric was 1 when last seen, within `window`, at a target that only fails.

    It is still listed, and every scrape of `failing` failed (`up` is 0). Only a scraper can detect
    this: inside the node agent it never holds by itself.
    """

    metric: Metric
    window: Duration
    failing: Duration


@dataclass(frozen=True, slots=True)
class Silent(Predicate):
    """Jobs with targets that show no series of `metric` for `window`; the value: how many do not.

    Targets that are there and were so long ago, by the selector `targets` of `Values`. They have
    no run, so neither has this. Only a scraper can detect this: it never holds in
    the node agent.
    """

    metric: Metric
    window: Duration


@dataclass(frozen=True, slots=True)
class AtTarget(Predicate):
    """Runs for which something holds at one of the targets that show them; the largest value.

    Two jobs under one name are shown by two targets: what is at a standstill is one of them, and a
    smallest value over both would hide it. `part` keeps `TARGET_LABELS` in all of its signals.
    """

    part: Predicate


TARGET_LABELS = ("instance",)
"""Labels by which a scraper distinguishes the targets that show a run."""


@dataclass(frozen=True, slots=True)
class Joined(Predicate):
    """Predicates joined by one set operator; made by `all_of`, `any_of` and `unless`."""

    operator: Literal["and", "or", "unless"]
    parts: tuple[Predicate, ...]


def all_of(*parts: Predicate) -> Joined:
    """Return: runs for which every part holds; the value is that of the first."""
    return Joined("and", parts)


def any_of(*parts: Predicate) -> Joined:
    """Return: runs for which at least one part holds; the value is that of the first that does."""
    return Joined("or", parts)


def unless(claim: Predicate, *excuses: Predicate) -> Joined:
    """Return: runs for which `claim` holds and none of the excuses does."""
    return Joined("unless", (claim, *excuses))


def kept_labels(expression: Expression) -> tuple[str, ...]:
    """Return the labels that the result has besides those of the run."""
    match expression:
        case Series():
            return expression.keep
        case Compare(left=left, right=right) | Arithmetic(left=left, right=right):
            # One of them may be a number.
            return kept_labels(left) or kept_labels(right)
        case Seen(signal):
            return kept_labels(signal)
        case Joined(parts=parts):
            return kept_labels(parts[0])
    return ()


@cache
def metrics_of(expression: Expression) -> frozenset[Metric]:
    """Return the metrics that an expression looks at."""
    kinds = Count | Gone | Series | Silent | Unreachable
    return frozenset(node.metric for node in walk(expression) if isinstance(node, kinds))
