"""What a report shows: tables, for a terminal or a page, and plots; and its JSON.

Every number is finite. JSON is what any reader takes, with a format and a version.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any

from mp_agent.report.numbers import number

TONES = {"critical": "bad", "warning": "warn", "info": "info", "": "good"}
"""How a severity is coloured."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text in a table with a tone: `good`, `bad`, `warn`, `info`, or another class of a page."""

    text: str
    tone: str = ""
    tag: bool = False
    title: str = ""
    """What a pointer on it shows, on a page."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: columns of numbers but for those of `text`."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = "table"
    text: Collection[int] = (0,)
    """Indices of columns that begin at the left."""
    marked: Collection[int] = ()
    """Indices of rows that stand out."""


Values = Sequence[float | None]
"""One for each place; None for what was not observed or cannot be drawn."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot."""

    label: str
    values: Values
    color: str = "series"
    """A colour of the style sheet."""
    points: bool = False
    """Whether single points are drawn in place of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves with one axis of values."""

    id: str
    title: str
    caption: str
    curves: Sequence[Curve]
    log: int | None = None
    """Base of a logarithmic axis; None for a linear one."""
    limits: Sequence[tuple[float, str]] = ()
    """Horizontal lines: value and label."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """By index of a place that is marked, why."""

    @property
    def description(self) -> str:
        """The plot as text, for readers who do not see it."""
        several = len(self.curves) > 1
        parts = [
            (f"{curve.label}: " if several else "") + _extent(curve.values) for curve in self.curves
        ]
        marks = f"; {len(self.marks)} marked" if self.marks else ""
        return f"{self.title}: {'; '.join(parts)}{marks}"


def _extent(values: Values) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "no value"
    ends = f"smallest {number(min(known))}, largest {number(max(known))}"
    return f"{ends}, last {number(known[-1])}"


@dataclass(frozen=True, slots=True)
class Lane:
    """What one rank did: runs of places (first, last, kind)."""

    name: str
    runs: Sequence[tuple[int, int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plots:
    """Plots over the same places, which one pointer follows."""

    label: str = "step"
    """What a place is."""
    places: Sequence[int]
    """Their common axis, ascending."""
    steps: Sequence[int] | None = None
    """The number that each place is known by, where it is another one."""
    names: Sequence[str] | None = None
    """What is shown of each place in addition to its number."""
    plots: Sequence[Plot]
    marked: int | None = None
    """A place with a vertical line."""
    spans: Sequence[tuple[int, int, str]] = ()
    """Bands: first and last place, colour."""
    lanes: Sequence[Lane] = ()
    joined: bool = False
    """Whether a curve crosses places without a value."""

    def as_json(self) -> dict[str, Any]:
        """Return what the script of the page reads."""
        return {**asdict(self), "places": list(self.places)}


def written(document: Mapping[str, Any]) -> str:
    """Return a document as JSON; a number that is not finite is null.

    Its `version` rises when a key changes its meaning or goes; keys may be added without it.
    """
    return json.dumps(plain(document), indent=2, ensure_ascii=True, allow_nan=False)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: records by field, enumerations by value."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def picked(record: Any, *names: str) -> dict[str, Any]:
    """Return some attributes of a record by name, where a document does not hold all of them."""
    return {name: getattr(record, name) for name in names}
