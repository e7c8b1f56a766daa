"""Predicates: the runs for which something holds. Their value is that of the first signal.

With `signals` these are all nodes there are. A predicate over a signal without a value does not
hold. Where a signal keeps labels, each value of them is judged by itself, and goes by the run when
it is joined with a predicate that keeps others.
"""

from dataclasses import dataclass
from typing import Literal

from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions.nodes import Expression
from mp_agent.alerting.expressions.signals import Arithmetic, Series, Signal
from mp_agent.catalog.metric import Metric


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
