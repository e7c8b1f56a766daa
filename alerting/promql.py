"""Expressions as PromQL, one value per run, for Prometheus and what speaks its language."""

from enum import IntEnum

from mp_agent.alerting.durations import SCRAPE_GAP, Duration
from mp_agent.alerting.expressions import (
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
    Where,
    kept_labels,
)
from mp_agent.alerting.values import Values, number_text
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import agent
from mp_agent.catalog.thresholds import level_label

__all__ = ["RUN_LABELS", "label_text", "number_text", "promql", "quoted", "selector"]

RUN_LABELS = ("cluster", "namespace", "job", "run")
"""What a scraper knows a run by; every alert is of one run."""

_BY_RUN = f"by ({', '.join(RUN_LABELS)})"
_ON_SOURCE = f"on ({', '.join((*RUN_LABELS, 'instance'))})"
_ON_RUN = f"on ({', '.join(RUN_LABELS)})"
_ON_TARGET = "on (cluster, namespace, job, instance)"
_BY_JOB = f"by ({', '.join(RUN_LABELS[:-1])})"
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
            return values.limit_text(threshold)
        case Number(value):
            return number_text(value)
        case Length(length):
            return values.length_text(length)
        case Series():
            return _series(expression, values)
        case Count():
            return _count(expression, values)
        case Recorded(name):
            return name
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
        case Unreachable():
            return _unreachable(expression, values)
        case Silent():
            return _silent(expression, values)
        case AtTarget(part):
            return f"max {_BY_RUN} {_enclosed(promql(part, values))}"
        case Joined():
            return _joined(expression, values)
    raise TypeError(f"{type(expression).__name__} has no PromQL")


def quoted(text: str) -> str:
    """Return a label value as PromQL and series notation write it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def label_text(value: str | Limit) -> str:
    """Return a label's value; a threshold stands for its level, as the node agent writes it."""
    return value if isinstance(value, str) else level_label(value.threshold.name)


def _series(series: Series, values: Values) -> str:
    function, window = series.over or ("last_over_time", SCRAPE_GAP)
    chosen = selector(series.metric, series.matchers, values)
    text = f"{function}({chosen}{_range(window, series.before, values)})"
    return f"{series.aggregate} by ({', '.join((*RUN_LABELS, *series.keep))}) ({text})"


def _count(count: Count, values: Values) -> str:
    """Of copies of one series (scraped twice, or by two Prometheis) the largest counts."""
    series = selector(count.metric, count.matchers, values)
    within = _range(count.window, count.before, values)
    earlier = _range(SCRAPE_GAP, (count.window, *count.before), values)
    counting = selector(agent.COUNTING, (), values)
    age = f"last_over_time({counting}{_range(SCRAPE_GAP, count.before, values)})"
    born = (
        f"last_over_time({series}{within})\n"
        f"and {_ON_SOURCE} ({age} < {values.length_text(count.window)})\n"
        f"unless last_over_time({series}{earlier})"
    )
    either = _enclosed(f"{_enclosed(born)}\nor increase({series}{within})")
    if not count.labels:
        return f"max {_BY_RUN} {either}"
    each = f"max by ({', '.join((*RUN_LABELS, *count.labels))}) {either}"
    return f"sum {_BY_RUN} {_enclosed(each)}"


def _arithmetic(node: Arithmetic, values: Values) -> str:
    binding = _binding(node)
    left, right = _operand(node.left, values, binding), _operand(node.right, values, binding)
    if node.operator == "/" and not isinstance(node.right, Limit | Number | Length):
        right = _enclosed(f"{promql(node.right, values)} != 0")
    return _infix(left, node.operator, right)


def _comparison(node: Compare, values: Values) -> str:
    left = _operand(node.left, values, _Binding.COMPARISON)
    right = _operand(node.right, values, _Binding.COMPARISON)
    if "\n" in left and "\n" not in right:
        return f"{left} {node.operator} {right}"
    return _infix(left, node.operator, right)


def _gone(node: Gone, values: Values) -> str:
    series = f"{selector(node.metric, (), values)}[{values.duration(node.window)}]"
    at_target = f"(last_over_time({series}) == 1)\nunless {_ON_TARGET}\n(up == 0)"
    return f"max {_BY_RUN} {_enclosed(at_target)}"


def _unreachable(node: Unreachable, values: Values) -> str:
    series = f"{selector(node.metric, (), values)}[{values.duration(node.window)}]"
    failing = f"max_over_time(up[{values.duration(node.failing)}])"
    at_target = f"(last_over_time({series}) == 1)\nand {_ON_TARGET}\n({failing} == 0)"
    return f"max {_BY_RUN} {_enclosed(at_target)}"


def _silent(node: Silent, values: Values) -> str:
    targets, window = f"up{{{values.selectors['targets']}}}", values.duration(node.window)
    shown = f"present_over_time({selector(node.metric, (), values)}[{window}])"
    without = f"{targets}\nand\n{targets} offset {window}\nunless {_ON_TARGET}\n{shown}"
    return f"count {_BY_JOB} {_enclosed(without)}"


def _joined(node: Joined, values: Values) -> str:
    first, *others = node.parts
    binding = _binding(node)
    chains = _binding(first) >= binding
    text = promql(first, values) if chains else _operand(first, values, binding)
    for other in others:
        alike = kept_labels(other) == kept_labels(first)
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
        case Arithmetic():
            return _Binding.PRODUCT
        case Seen(signal):
            return _binding(signal)
    return _Binding.ATOM


def _operand(expression: Expression, values: Values, operator: _Binding) -> str:
    """Return the expression as an operand, in parentheses where they are due."""
    text = promql(expression, values)
    return text if _binding(expression) > operator else _enclosed(text)


def _range(window: Duration, before: tuple[Duration, ...], values: Values) -> str:
    """Return a range of time that ended `before` ago, as it is written after a selector."""
    offset = f" offset {values.duration(*before)}" if before else ""
    return f"[{values.duration(window)}]{offset}"


def selector(metric: Metric, matchers: tuple[Where, ...], values: Values) -> str:
    """Return the selector of a metric's series, with what a site has added."""
    own = (
        f"{matcher.label}{matcher.operator}{quoted(label_text(matcher.value))}"
        for matcher in matchers
    )
    text = ",".join(filter(None, (*own, values.selectors["series"])))
    return f"{metric.prometheus_name}{{{text}}}" if text else metric.prometheus_name


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
