"""Expressions as functions of what was read: an alternative to PromQL.

There is one interpreter per type of node.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mp_agent.alerting.detector.history import RANGE_FUNCTIONS, History, Window
from mp_agent.alerting.detector.readings import Readings
from mp_agent.alerting.detector.vectors import (
    AGGREGATES,
    ARITHMETIC,
    COMPARISONS,
    NOTHING,
    Interpreted,
    Kept,
    Moment,
    Vector,
    constant,
    kept_values,
    matched,
    once,
    selection,
)
from mp_agent.alerting.durations import SCRAPE_GAP, Duration
from mp_agent.alerting.expressions import (
    TARGET_LABELS,
    Arithmetic,
    AtTarget,
    Compare,
    Count,
    Either,
    Expression,
    Gone,
    Joined,
    Length,
    Limit,
    Number,
    Recorded,
    Seen,
    Series,
    Silent,
    Unreachable,
    metrics_of,
)
from mp_agent.alerting.values import Values
from mp_agent.catalog.metrics import agent
from mp_agent.errors import CatalogError


class Interpreter:
    """Interprets expressions over one run's readings; equal ones are evaluated once a moment."""

    def __init__(self, readings: Readings, values: Values) -> None:
        self._readings = readings
        self._values = values
        self._known: dict[Expression, Interpreted] = {}

    def interpret(self, expression: Expression) -> Interpreted:
        """Return an expression ready to be evaluated, and have remembered what it looks at.

        Raises CatalogError, naming the node, for one that has no interpreter here.
        """
        known = self._known.get(expression)
        if known is None:
            method = INTERPRETERS.get(type(expression))
            if method is None:
                raise CatalogError(f"{type(expression).__name__} has no interpreter")
            interpreted = method(self, expression)
            names = frozenset(metric.prometheus_name for metric in metrics_of(expression))
            evaluate = once(interpreted.evaluate, self._readings, names)
            known = self._known[expression] = interpreted._replace(evaluate=evaluate)
        return known

    def _limit(self, node: Limit) -> Interpreted:
        return constant(self._values.limit(node.threshold))

    def _number(self, node: Number) -> Interpreted:
        return constant(node.value)

    def _length(self, node: Length) -> Interpreted:
        return constant(self._seconds(node.duration))

    def _series(self, node: Series) -> Interpreted:
        before_seconds = self._seconds(*node.before)
        combine = AGGREGATES.get(node.aggregate)
        if combine is None:
            raise CatalogError(f"Series: {node.aggregate!r} has no interpreter")
        read = self._instant(node, before_seconds)
        if node.over:
            read = self._range(*node.over, before_seconds)
        of_round = not node.over and not before_seconds
        timed = not of_round
        lowest = node.aggregate == "min"
        window_seconds = self._seconds(node.over[1] if node.over else SCRAPE_GAP)
        name = node.metric.prometheus_name
        self._readings.need(name, window_seconds + before_seconds)
        select = selection(self._readings, name, node.matchers)
        kept = node.keep

        def evaluate(moment: Moment) -> Vector:
            found: dict[Kept, float] = {}
            moment.timed |= timed
            for labels, history in select():
                moment.timed |= not history.alive
                if moment.until_step is None or not history.alive:
                    value = read(history, moment.now_seconds)
                elif (extremes := history.extremes_until(moment.until_step)) is None:
                    continue
                elif of_round:
                    value = extremes[0 if lowest else 1]
                else:
                    value = read(history, moment.now_seconds)
                if value is not None:
                    key = kept_values(labels, kept)
                    found[key] = combine(found[key], value) if key in found else value
            return found

        return Interpreted(evaluate, kept)

    def _instant(
        self, node: Series, before_seconds: float
    ) -> Callable[[History, float], float | None]:
        last = self._range("last_over_time", SCRAPE_GAP, before_seconds)
        if before_seconds:
            return last
        if node.aggregate == "min":
            return lambda history, now_seconds: (
                history.low if history.alive else last(history, now_seconds)
            )
        return lambda history, now_seconds: (
            history.high if history.alive else last(history, now_seconds)
        )

    def _range(
        self, name: str, length: Duration, before_seconds: float
    ) -> Callable[[History, float], float | None]:
        function = RANGE_FUNCTIONS.get(name)
        if function is None:
            raise CatalogError(f"{name} has no interpreter")
        window_seconds = self._seconds(length)

        def read(history: History, now_seconds: float) -> float | None:
            end_seconds = now_seconds - before_seconds
            window = Window(history, end_seconds - window_seconds, end_seconds)
            return function(window) if window.seen else None

        return read

    def _count(self, node: Count) -> Interpreted:
        name = node.metric.prometheus_name
        window_seconds, before_seconds = self._seconds(node.window), self._seconds(*node.before)
        gap_seconds = self._seconds(SCRAPE_GAP)
        self._readings.need(name, window_seconds + before_seconds + gap_seconds)
        select = selection(self._readings, name, node.matchers)
        young = self._young(window_seconds, before_seconds)
        own_labels = node.labels

        def evaluate(moment: Moment) -> Vector:
            end_seconds = moment.now_seconds - before_seconds
            start_seconds = end_seconds - window_seconds
            found: dict[Kept, float] = {}
            for labels, history in select():
                if history.at_zero and not before_seconds:
                    found.setdefault(kept_values(labels, own_labels), 0.0)
                    continue
                moment.timed = True
                window = Window(history, start_seconds, end_seconds)
                if not window.seen:
                    continue
                if history.known(start_seconds - gap_seconds, start_seconds):
                    value = window.rise()
                elif kept_values(labels, TARGET_LABELS) in young(moment):
                    value = _since_birth(window)
                else:
                    value = window.rise() - history.born_with(start_seconds)
                if moment.until_step is not None and not before_seconds:
                    value -= history.rise_after(moment.until_step)
                key = kept_values(labels, own_labels)
                found[key] = max(found.get(key, 0.0), value)
            return {(): sum(found.values())} if found else NOTHING

        return Interpreted(evaluate)

    def _young(
        self, window_seconds: float, before_seconds: float
    ) -> Callable[[Moment], frozenset[Kept]]:
        """Return a selector of targets that had counted for less than a window, `before` ago."""
        name = agent.COUNTING.prometheus_name
        self._readings.need(name, before_seconds + self._seconds(SCRAPE_GAP))
        age = self._range("last_over_time", SCRAPE_GAP, before_seconds)

        def young(moment: Moment) -> frozenset[Kept]:
            ages = (
                (labels, age(history, moment.now_seconds))
                for labels, history in self._readings.series(name).items()
            )
            return frozenset(
                kept_values(labels, TARGET_LABELS)
                for labels, seconds in ages
                if seconds is not None and seconds < window_seconds
            )

        return young

    def _recorded(self, node: Recorded) -> Interpreted:
        return self.interpret(node.signal)

    def _gone(self, node: Gone) -> Interpreted:
        name, window_seconds = node.metric.prometheus_name, self._seconds(node.window)
        self._readings.need(name, window_seconds)
        self._readings.need("up", 0.0)
        last = self._range("last_over_time", node.window, 0.0)

        def evaluate(moment: Moment) -> Vector:
            moment.timed = True
            failing = {
                kept_values(labels, TARGET_LABELS)
                for labels, value in self._readings.standing("up")
                if value == 0
            }
            for labels, history in self._readings.series(name).items():
                up = kept_values(labels, TARGET_LABELS) not in failing
                if up and last(history, moment.now_seconds) == 1:
                    return {(): 1.0}
            return NOTHING

        return Interpreted(evaluate)

    def _unreachable(self, node: Unreachable) -> Interpreted:
        name = node.metric.prometheus_name
        self._readings.need(name, self._seconds(node.window))
        self._readings.need("up", self._seconds(node.failing))
        last = self._range("last_over_time", node.window, 0.0)
        best = self._range("max_over_time", node.failing, 0.0)

        def evaluate(moment: Moment) -> Vector:
            moment.timed = True
            failing = {
                kept_values(labels, TARGET_LABELS)
                for labels, history in self._readings.series("up").items()
                if best(history, moment.now_seconds) == 0
            }
            for labels, history in self._readings.series(name).items():
                down = kept_values(labels, TARGET_LABELS) in failing
                if down and last(history, moment.now_seconds) == 1:
                    return {(): 1.0}
            return NOTHING

        return Interpreted(evaluate)

    def _either(self, node: Either) -> Interpreted:
        return self._union((node.first, node.second))

    def _arithmetic(self, node: Arithmetic) -> Interpreted:
        left, right = self.interpret(node.left), self.interpret(node.right)
        calculate = ARITHMETIC[node.operator]
        divides = node.operator == "/"
        pairs = matched(left, right)

        def evaluate(moment: Moment) -> Vector:
            return {
                key: calculate(one, other)
                for key, one, other in pairs(moment)
                if not (divides and other == 0)
            }

        kept = right.kept if left.scalar else left.kept
        return Interpreted(evaluate, kept, left.scalar and right.scalar)

    def _compare(self, node: Compare) -> Interpreted:
        left, right = self.interpret(node.left), self.interpret(node.right)
        holds = COMPARISONS[node.operator]
        pairs = matched(left, right)
        keep_right = left.scalar and not right.scalar

        def evaluate(moment: Moment) -> Vector:
            return {
                key: other if keep_right else one
                for key, one, other in pairs(moment)
                if holds(one, other)
            }

        return Interpreted(evaluate, right.kept if keep_right else left.kept)

    def _seen(self, node: Seen) -> Interpreted:
        return self.interpret(node.signal)

    def _silent(self, node: Silent) -> Interpreted:
        return Interpreted(lambda moment: NOTHING)

    def _at_target(self, node: AtTarget) -> Interpreted:
        part = self.interpret(node.part)

        def evaluate(moment: Moment) -> Vector:
            found = part.evaluate(moment)
            return {(): max(found.values())} if found else NOTHING

        return Interpreted(evaluate)

    def _joined(self, node: Joined) -> Interpreted:
        if node.operator == "or":
            return self._union(node.parts)
        first, *others = (self.interpret(part) for part in node.parts)
        wanted = node.operator == "and"

        def evaluate(moment: Moment) -> Vector:
            found = first.evaluate(moment)
            for other in others:
                if not found:
                    return NOTHING
                having = other.evaluate(moment)
                if other.kept == first.kept:
                    found = {key: found[key] for key in found if (key in having) is wanted}
                elif bool(having) is not wanted:
                    return NOTHING
            return found

        return Interpreted(evaluate, first.kept)

    def _union(self, parts: tuple[Expression, ...]) -> Interpreted:
        """Interpret `or`: what the first has, and of each other what no earlier one has."""
        alternatives = [self.interpret(part) for part in parts]
        kept = alternatives[0].kept
        if any(alternative.kept != kept for alternative in alternatives):
            raise CatalogError("the parts of an `or` keep different labels")

        def evaluate(moment: Moment) -> Vector:
            found = alternatives[0].evaluate(moment)
            for alternative in alternatives[1:]:
                if found and not kept:
                    return found
                found = {**alternative.evaluate(moment), **found}
            return found

        return Interpreted(evaluate, kept)

    def _seconds(self, *durations: Duration) -> float:
        return sum(self._values.seconds[length.name] for length in durations)


INTERPRETERS: Mapping[type[Expression], Callable[[Interpreter, Any], Interpreted]] = {
    Arithmetic: Interpreter._arithmetic,
    AtTarget: Interpreter._at_target,
    Compare: Interpreter._compare,
    Count: Interpreter._count,
    Either: Interpreter._either,
    Gone: Interpreter._gone,
    Joined: Interpreter._joined,
    Length: Interpreter._length,
    Limit: Interpreter._limit,
    Number: Interpreter._number,
    Recorded: Interpreter._recorded,
    Seen: Interpreter._seen,
    Series: Interpreter._series,
    Silent: Interpreter._silent,
    Unreachable: Interpreter._unreachable,
}


def _since_birth(window: Window) -> float:
    """Return a counter's value at the window's end: it was first seen in the window.

    Where it was also reset there, what it had counted before the reset is added.
    """
    return max(window.values()[-1], window.rise())
