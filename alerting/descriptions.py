"""Descriptions of alerts: text with marks, for Prometheus' templates and for readers in Python.

`<grad_norm_high>`
    a threshold or duration in force
`{rank}`, `{run| of run }`
    a label of the alert; with the text before it, where the alert has the label at all
`{value|count}`
    the alert's value: as a `count`, a `number` of four digits, or a `percent`
`{mp_agent_x_info| Seen at |step rank}`
    the text and then what the series that the run has of an info metric name, or nothing where it
    has none: of one label the values, of several those that are not empty, each after its name
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mp_agent.alerting.values import Values, check_marks
from mp_agent.catalog.metric import Kind
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.errors import CatalogError

Labels = Mapping[str, str]
Lookup = Callable[[str], Iterable[Labels]]
"""From an info metric's Prometheus name to the labels of the run's present series."""

_MARK = re.compile(r"\{([^{}]*)\}")
_RUN_IDENTITY = ("cluster", "namespace", "job", "run")
_GO_FORMATS = {
    "count": 'printf "%.0f" $value',
    "number": 'printf "%.4g" $value',
    "percent": "$value | humanizePercentage",
}
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "count": lambda value: f"{value:.0f}",
    "number": lambda value: f"{value:.4g}",
    "percent": lambda value: f"{value * 100:.4g}%",
}


@dataclass(frozen=True, slots=True)
class LabelMark:
    """A label of the alert, after `lead`; nothing at all where the label is empty."""

    label: str
    lead: str = ""

    def template(self) -> str:
        """Return the mark as a template of Prometheus."""
        if not self.lead:
            return f"{{{{ $labels.{self.label} }}}}"
        return f"{{{{ with $labels.{self.label} }}}}{self.lead}{{{{ . }}}}{{{{ end }}}}"

    def text(self, labels: Labels) -> str:
        """Return what the mark stands for."""
        value = labels.get(self.label, "")
        return self.lead + value if value else ""


@dataclass(frozen=True, slots=True)
class ValueMark:
    """The alert's value in a human form."""

    form: str

    def template(self) -> str:
        """Return the mark as a template of Prometheus."""
        return f"{{{{ {_GO_FORMATS[self.form]} }}}}"

    def text(self, value: float) -> str:
        """Return what the mark stands for."""
        return _FORMATS[self.form](value)


@dataclass(frozen=True, slots=True)
class InfoMark:
    """What the series of an info metric name, in the order of the first of the labels."""

    metric: str
    lead: str
    labels: tuple[str, ...]

    def template(self) -> str:
        """Return the mark as a template of Prometheus, which queries the run's series."""
        matchers = ",".join(f"{label}=%q" for label in _RUN_IDENTITY)
        arguments = " ".join(f"$labels.{label}" for label in _RUN_IDENTITY)
        query = f'printf "{self.metric}{{{matchers}}}" {arguments} | query'
        return (
            f"{{{{ with {query} }}}}{self.lead}"
            f'{{{{ range $i, $series := sortByLabel "{self.labels[0]}" . }}}}'
            f"{{{{ if $i }}}}{self._between}{{{{ end }}}}{self._series_template()}{{{{ end }}}}."
            f"{{{{ end }}}}"
        )

    def text(self, series: Sequence[Labels]) -> str:
        """Return what the mark stands for, of the labels of the series that are there."""
        if not series:
            return ""
        ordered = sorted(series, key=lambda labels: labels.get(self.labels[0], ""))
        return self.lead + self._between.join(map(self._series_text, ordered)) + "."

    @property
    def _between(self) -> str:
        return ", " if len(self.labels) == 1 else "; "

    def _series_template(self) -> str:
        if len(self.labels) == 1:
            return f'{{{{ $series | label "{self.labels[0]}" }}}}'
        first, *others = self.labels
        named = "".join(
            f'{{{{ with $series | label "{label}" }}}}, {label} {{{{ . }}}}{{{{ end }}}}'
            for label in others
        )
        return f'{first} {{{{ $series | label "{first}" }}}}{named}'

    def _series_text(self, labels: Labels) -> str:
        if len(self.labels) == 1:
            return labels.get(self.labels[0], "")
        first, *others = self.labels
        named = (f", {label} {labels[label]}" for label in others if labels.get(label))
        return f"{first} {labels.get(first, '')}" + "".join(named)


Part = str | LabelMark | ValueMark | InfoMark


def parse_description(owner: str, text: str, labels: Iterable[str]) -> tuple[Part, ...]:
    """Return a description's parts; CatalogError, naming `owner`, when a mark means nothing.

    labels: those that the alert has.
    """
    check_marks(owner, text)
    parts: list[Part] = []
    end = 0
    for found in _MARK.finditer(text):
        parts += [text[end : found.start()], _mark(owner, found[1], frozenset(labels))]
        end = found.end()
    parts.append(text[end:])
    if any(isinstance(part, str) and ("{" in part or "}" in part) for part in parts):
        raise CatalogError(f"{owner}: a brace in {text!r} belongs to no mark")
    return tuple(part for part in parts if part)


def prometheus_template(parts: Iterable[Part], values: Values) -> str:
    """Return a description as a template of Prometheus, with the numbers in force."""
    return values.fill("".join(p if isinstance(p, str) else p.template() for p in parts))


def plain_text(
    parts: Iterable[Part], values: Values, labels: Labels, value: float, lookup: Lookup
) -> str:
    """Return a description as the alert of these labels and this value has it."""
    return "".join(_text(part, values, labels, value, lookup) for part in parts)


def _text(part: Part, values: Values, labels: Labels, value: float, lookup: Lookup) -> str:
    match part:
        case LabelMark():
            return part.text(labels)
        case ValueMark():
            return part.text(value)
        case InfoMark():
            return part.text(list(lookup(part.metric)))
    return values.fill(part)


def _mark(owner: str, text: str, labels: frozenset[str]) -> Part:
    name, *rest = text.split("|")
    match rest:
        case [form] if name == "value" and form in _FORMATS:
            return ValueMark(form)
        case [lead, names] if name in BY_PROMETHEUS_NAME:
            return _info_mark(owner, name, lead, tuple(names.split()))
        case [] if name in labels:
            return LabelMark(name)
        case [lead] if name in labels:
            return LabelMark(name, lead)
    raise CatalogError(
        f"{owner}: {{{text}}} is no label of the alert ({', '.join(sorted(labels))}), no value as "
        f"{', '.join(_FORMATS)}, and no info metric with text and labels"
    )


def _info_mark(owner: str, name: str, lead: str, labels: tuple[str, ...]) -> InfoMark:
    metric = BY_PROMETHEUS_NAME[name]
    if metric.kind is not Kind.INFO or not labels or not set(labels) <= set(metric.labels):
        raise CatalogError(
            f"{owner}: {name} is no info metric with labels {' '.join(labels) or 'named'}"
        )
    return InfoMark(name, lead, labels)
