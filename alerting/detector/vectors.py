"""The series that an expression looks at, as vectors of labelled values.

What an expression comes to at a moment, and how two of them are put together.
A vector is what PromQL calls an instant vector of one run: the values of the labels that are kept
besides those of the run, to a number.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import add, eq, ge, gt, le, lt, mul, ne, sub, truediv
from typing import NamedTuple

from mp_agent.alerting.detector.history import History
from mp_agent.alerting.detector.readings import Labels, Readings
from mp_agent.alerting.expressions import Where
from mp_agent.alerting.promql import label_text
from mp_agent.errors import CatalogError

Selection = Callable[[], list[tuple[Labels, History]]]
"""Returns the series as they are at the moment."""

_LABELS_REMEMBERED = 4096


def selection(readings: Readings, name: str, matchers: tuple[Where, ...]) -> Selection:
    """Return what selects the series of a metric by the matchers; without any, all of them."""
    matches = _matching(matchers)

    def select() -> list[tuple[Labels, History]]:
        series = readings.series(name)
        return [item for item in series.items() if not matchers or matches(item[0])]

    return select


def _matching(matchers: tuple[Where, ...]) -> Callable[[Labels], bool]:
    tests = [
        (matcher.label, _label_test(matcher.operator, label_text(matcher.value)))
        for matcher in matchers
    ]

    @lru_cache(_LABELS_REMEMBERED)
    def matches(labels: Labels) -> bool:
        found = dict(labels)
        return all(test(found.get(label, "")) for label, test in tests)

    return matches


def _label_test(operator: str, value: str) -> Callable[[str], bool]:
    if operator in ("=", "!="):
        return lambda found: (found == value) is (operator == "=")
    pattern = re.compile(value, re.DOTALL)
    return lambda found: bool(pattern.fullmatch(found)) is (operator == "=~")


Kept = tuple[str, ...]
"""Values of the kept labels, in their order; "" where the series has no such label."""

Vector = Mapping[Kept, float]

NOTHING: Vector = {}


@dataclass(slots=True, eq=False)
class Moment:
    """One evaluation: its time.

    until_step: readings of later steps are left out, of those since the last evaluation.
    timed: whether what is being evaluated may change while none of its series does.
    """

    now_seconds: float
    until_step: int | None = None
    timed: bool = False


class Interpreted(NamedTuple):
    """An expression, ready to be evaluated. scalar: a number rather than one per run."""

    evaluate: Callable[[Moment], Vector]
    kept: tuple[str, ...] = ()
    scalar: bool = False


COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
    "==": eq,
    "!=": ne,
}

ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": truediv,
}

AGGREGATES: Mapping[str, Callable[[float, float], float]] = {"max": max, "min": min}


def once(
    evaluate: Callable[[Moment], Vector], readings: Readings, names: frozenset[str]
) -> Callable[[Moment], Vector]:
    """Return `evaluate` such that it is asked once a moment, and only where that may change it.

    names: of the series that it looks at.
    """
    last: Moment | None = None
    result: Vector = NOTHING
    timed, changes = True, 0

    def evaluate_once(moment: Moment) -> Vector:
        nonlocal last, result, timed, changes
        whole = moment.until_step is None
        if moment is not last and not (whole and not timed and readings.same(names, changes)):
            around, moment.timed = moment.timed, False
            changes = readings.changes
            result = evaluate(moment)
            timed = moment.timed or not whole
            moment.timed = around
        last = moment
        moment.timed |= timed
        return result

    return evaluate_once


def constant(value: float) -> Interpreted:
    """Return a number as an expression."""
    vector: Vector = {(): value}
    return Interpreted(lambda moment: vector, scalar=True)


def matched(
    left: Interpreted, right: Interpreted
) -> Callable[[Moment], list[tuple[Kept, float, float]]]:
    """Return a function that gives (labels, left value, right value) of what belongs together."""
    if right.scalar:
        return lambda moment: [
            (key, value, right.evaluate(moment)[()]) for key, value in left.evaluate(moment).items()
        ]
    if left.scalar:
        return lambda moment: [
            (key, left.evaluate(moment)[()], value) for key, value in right.evaluate(moment).items()
        ]
    if left.kept != right.kept:
        raise CatalogError("two operands keep different labels")

    def pairs(moment: Moment) -> list[tuple[Kept, float, float]]:
        one = left.evaluate(moment)
        if not one:
            return []
        other = right.evaluate(moment)
        return [(key, one[key], other[key]) for key in one if key in other]

    return pairs


def kept_values(labels: Labels, kept: tuple[str, ...]) -> Kept:
    """Return a series' values of the labels that are kept."""
    if not kept:
        return ()
    found = dict(labels)
    return tuple(found.get(label, "") for label in kept)
