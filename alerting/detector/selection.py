"""Which of a metric's series an expression looks at: those whose labels match."""

import re
from collections.abc import Callable
from functools import lru_cache

from mp_agent.alerting.detector.history import History
from mp_agent.alerting.detector.readings import Labels, Readings
from mp_agent.alerting.expressions.promql import label_text
from mp_agent.alerting.expressions.signals import Where

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
