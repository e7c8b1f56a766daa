"""Expressions as PromQL, one value per run, for Prometheus and what speaks its language."""

from enum import IntEnum

from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Expression
from mp_agent.alerting.predicates import Compare, Gone, Joined, Seen
from mp_agent.alerting.signals import (
    Arithmetic,
    Count,
    Either,
    Length,
    Limit,
    Mean,
    Number,
    Series,
    Where,
)
from mp_agent.alerting.values import Values
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.thresholds import bound_label

RUN_LABELS = ("cluster", "namespace", "job", "run")
"""What a scraper knows a run by; every alert is of one run."""

_BY_RUN = f"by ({', '.join(RUN_LABELS)})"
_ON_RUN = f"on ({', '.join(RUN_LABELS)})"
_ON_TARGET = "on (cluster, namespace, job, instance)"
_BIRTH_WINDOW = duration("birth_window")
_WIDTH = 120


class _Binding(IntEnum):
    """How tightly the outermost operator of a text binds, loosest first."""

    OR = 1
    AND = 2
    """`and` and `unless`, which bind alike, from the left."""
    COMPARISON = 3
    SUM = 4
    PRODUCT = 5
    ATOM = 6


def promql(expression: Expression, values: Values) -> str:
    """Return the expression with the numbers in force."""
    match expression:
        case Limit(threshold):
            return number_text(values.limit(threshold))
        case Number(value):
            return number_text(value)
        case Length(length):
            return number_text(round(values.seconds[length.name], 3))
        case Series():
            return _series(expression, values)
        case Count():
            return _count(expression, values)
        case Mean(metric):
            return _mean(metric)
        case Either(first, second):
            return _infix(promql(first, values), "or", promql(second, values))
        case Arithmetic():
            return _arithmetic(expression, values)
        case Compare():
            return _comparison(expression, values)
        case Seen(signal):
            return promql(signal, values)
        case Gone():
            return _gone(expression, values)
        case Joined():
            return _joined(expression, values)
    raise TypeError(f"{type(expression).__name__} has no PromQL")


def number_text(value: float) -> str:
    """Return a number exactly, a whole one without a point."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def quoted(text: str) -> str:
    """Return a label value as PromQL and series notation write it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def label_text(value: str | Limit, values: Values) -> str:
    """Return a label's value; a threshold is written as the node agent writes it."""
    return value if isinstance(value, str) else bound_label(values.limit(value.threshold))


def _series(series: Series, values: Values) -> str:
    text = _selector(series.metric, series.where, values)
    if series.over:
        text += f"[{values.duration(series.over[1])}]"
    if series.before:
        text += f" offset {values.duration(*series.before)}"
    if series.over:
        leading = (number_text(argument) for argument in series.arguments)
        text = f"{series.over[0]}({', '.join((*leading, text))})"
    return f"{series.aggregate} by ({', '.join((*RUN_LABELS, *series.keep))}) ({text})"


def _count(count: Count, values: Values) -> str:
    series = _selector(count.metric, count.where, values)
    window, birth = values.duration(count.window), values.duration(_BIRTH_WINDOW)
    offset = f" offset {values.duration(*count.before)}" if count.before else ""
    earlier = values.duration(count.window, *count.before)
    born = (
        f"last_over_time({series}[{window}]{offset})\n"
        f"unless present_over_time({series}[{birth}] offset {earlier})"
    )
    either = f"{_enclosed(born)}\nor increase({series}[{window}]{offset})"
    return f"sum {_BY_RUN} {_enclosed(either)}"


def _mean(metric: Metric) -> str:
    name = metric.prometheus_name
    return _infix(f"sum {_BY_RUN} ({name}_sum)", "/", f"(sum {_BY_RUN} ({name}_count) > 0)")


def _arithmetic(node: Arithmetic, values: Values) -> str:
    binding = _binding(node)
    left, right = _operand(node.left, values, binding), _operand(node.right, values, binding)
    return _infix(left, node.operator, right)


def _comparison(node: Compare, values: Values) -> str:
    left = _operand(node.left, values, _Binding.COMPARISON)
    right = _operand(node.right, values, _Binding.COMPARISON)
    if "\n" in left and "\n" not in right:
        return f"{left} {node.operator} {right}"
    return _infix(left, node.operator, right)


def _gone(node: Gone, values: Values) -> str:
    series = f"{node.metric.prometheus_name}[{values.duration(node.window)}]"
    at_target = f"(last_over_time({series}) == 1)\nunless {_ON_TARGET}\n(up == 0)"
    return f"max {_BY_RUN} {_enclosed(at_target)}"


def _joined(node: Joined, values: Values) -> str:
    first, *others = node.parts
    binding = _binding(node)
    chains = _binding(first) >= binding
    text = promql(first, values) if chains else _operand(first, values, binding)
    for other in others:
        alike = _kept_labels(other) == _kept_labels(first)
        operator = node.operator if alike else f"{node.operator} {_ON_RUN}"
        text += f"\n{operator}\n{_operand(other, values, binding)}"
    return text


def _binding(expression: Expression) -> _Binding:
    match expression:
        case Either() | Joined(operator="or"):
            return _Binding.OR
        case Joined():
            return _Binding.AND
        case Compare():
            return _Binding.COMPARISON
        case Arithmetic(operator="+" | "-"):
            return _Binding.SUM
        case Arithmetic() | Mean():
            return _Binding.PRODUCT
        case Seen(signal):
            return _binding(signal)
    return _Binding.ATOM


def _kept_labels(expression: Expression) -> tuple[str, ...]:
    """Return the labels that the result has beside those of the run."""
    match expression:
        case Series():
            return expression.keep
        case Compare(left):
            return _kept_labels(left)
        case Seen(signal):
            return _kept_labels(signal)
        case Joined(parts=parts):
            return _kept_labels(parts[0])
    return ()


def _operand(expression: Expression, values: Values, operator: _Binding) -> str:
    """Return the expression as an operand, in parentheses where they are due."""
    text = promql(expression, values)
    return text if _binding(expression) > operator else _enclosed(text)


def _selector(metric: Metric, where: tuple[Where, ...], values: Values) -> str:
    matchers = ",".join(
        f"{matcher.label}{matcher.operator}{quoted(label_text(matcher.value, values))}"
        for matcher in where
    )
    return f"{metric.prometheus_name}{{{matchers}}}" if matchers else metric.prometheus_name


def _enclosed(text: str) -> str:
    """Return a text in parentheses, indented where it has several lines."""
    if "\n" not in text:
        return f"({text})"
    inner = "\n".join("  " + line for line in text.splitlines())
    return f"(\n{inner}\n)"


def _infix(left: str, operator: str, right: str) -> str:
    """Return `left operator right`, on three lines where one is not enough."""
    line = f"{left} {operator} {right}"
    fits = "\n" not in line and len(line) <= _WIDTH
    return line if fits else f"{left}\n{operator}\n{right}"
