"""What a panel is, before it becomes Grafana's JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mp_agent.alerting.condition import Condition
from mp_agent.catalog.metric import Kind, Metric
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import DEFAULTS

COLUMNS = 24
"""Width of Grafana's grid."""
LOWEST_ON_LOG_AXIS = 1e-12
"""uPlot 1.6.32 never finishes an axis that reaches 1e-26; a norm below this is as good as 0."""
STEP = "step"
"""Legend of the queries that a graph against the training step has on its other axis."""


class View(Enum):
    """How a panel draws."""

    STAT = "stat"
    TIMESERIES = "timeseries"
    HEATMAP = "heatmap"
    TIMELINE = "state-timeline"
    TABLE = "table"
    BY_STEP = "xychart"
    """Values against the training step; queries are pairs of a step and a value, one per run."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, how its series are called, and whether only the last value is asked for."""

    expression: str
    legend: str = ""
    instant: bool = False
    optional: bool = False
    """Whether a run may rightly have no such series (no scaler, no incident, no GPU)."""


@dataclass(frozen=True, slots=True)
class Step:
    """From which value on a colour holds; None for the lowest."""

    value: float | None
    color: str
    threshold: str = ""
    """Name of the threshold that the value is; a site may have set another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """How a table shows one field."""

    name: str
    title: str
    unit: str = "short"
    width: int | None = None
    steps: tuple[Step, ...] = ()
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Value → (text, colour)."""
    link: str = ""
    link_title: str = "Open"
    decimals: int | None = None
    number: bool = False
    """Whether a label's text is a number, by which the column is sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. Its `id` is stable: links and alerts point at it.

    description: how to read it; whole sentences. `<name>` stands for a threshold's value.
    runbooks: conditions that say what to do about what the panel shows.
    lines: whether `steps` are drawn, as lines in the colour of the worse side.
    """

    id: int
    title: str
    description: str
    queries: tuple[Query, ...]
    view: View = View.TIMESERIES
    runbooks: tuple[Condition, ...] = ()
    nothing: str = ""
    """What stands in place of data when there rightly is none."""
    width: int = 8
    height: int = 8
    unit: str = "short"
    decimals: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    soft_maximum: float | None = None
    """To where the axis of a graph goes at least; a linear one."""
    reaches: tuple[str, ...] = ()
    """Thresholds that lie within a graph's axis wherever the data are; for log axes as well."""
    log_base: int | None = None
    many_decades: bool = False
    """Whether a log axis may be so long that the lines of its grid would fill the graph."""
    sparse: bool = False
    """Whether a point may stand alone, so that it is drawn as one."""
    log_around_zero: float = 0.0
    """Up to which magnitude a log axis is linear, so that it has a place for any number; 0: for
    positive numbers alone, those below `LOWEST_ON_LOG_AXIS` drawn there."""
    log_when: str = ""
    """Expression of the runs that a linear graph shows on a log axis, linear around 0, instead."""
    colors: Mapping[str, str] = field(default_factory=dict)
    """Colours of series by their legend, where a colour has a meaning."""
    steps: tuple[Step, ...] = ()
    lines: bool = False
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    sort_by: tuple[str, ...] = ()
    """Titles of the columns that a table is sorted by, the largest first."""
    smallest_first: bool = False
    """Whether a table is sorted the other way round."""
    label: str = ""
    """Label whose value a stat shows in place of a number."""
    most_points: int | None = None
    """Points in time that are asked for at most, where each takes thousands of series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard: what it is called, what may be chosen, and its rows."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    one_run: bool = False
    """Whether exactly one run is shown at a time."""
    two_runs: bool = False
    """Whether a second run is chosen, to compare the first one with."""
    layer_variable: bool = False
    since: str = "now-1h"
    """Where the time range begins before a person has chosen one."""

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, from top to bottom."""
        return tuple(panel for row in self.rows for panel in row.panels)


PER_SECOND = "suffix:/s"
_UNITS = {"s": "s", "By": "bytes", "1": "percentunit"}


def unit_of(metric: Metric) -> str:
    """Return Grafana's name of a metric's unit; of a counter's rate where it is one."""
    if metric.name.endswith("timestamp"):
        return "dateTimeFromNow"
    unit = _UNITS.get(metric.unit, "short")
    if metric.kind is Kind.COUNTER:
        return "percentunit" if unit == "s" else PER_SECOND
    return unit


def help_of(name: str) -> str:
    """Return the help text of a metric in the catalog."""
    return BY_PROMETHEUS_NAME[name].help


def above(**colors: str) -> tuple[Step, ...]:
    """Return steps that start green and take each colour above the threshold of its name."""
    names = sorted(colors, key=DEFAULTS.__getitem__)
    return (Step(None, "green"), *(Step(DEFAULTS[name], colors[name], name) for name in names))


def below(**colors: str) -> tuple[Step, ...]:
    """Return steps that end green and have each colour below the threshold of its name."""
    names = sorted(colors, key=DEFAULTS.__getitem__)
    shades = [*(colors[name] for name in names[1:]), "green"]
    upper = (Step(DEFAULTS[name], shade, name) for name, shade in zip(names, shades, strict=True))
    return (Step(None, colors[names[0]]), *upper)


def between(low: tuple[Step, ...], high: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return steps that are green above those of `below` and under those of `above`."""
    return (*low, *high[1:])


def for_cells(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return steps of a number that is never negative, so that one not known has no colour."""
    return (Step(None, "text"), Step(0, steps[0].color), *steps[1:])
