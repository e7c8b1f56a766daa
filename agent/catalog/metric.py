"""Metric records, their Prometheus names, and snapshots of their values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import partial
from typing import Any

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.errors import CatalogError
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import AgentView, LayerView, RankView, RunView

Reading = float | None | Mapping[tuple[str, ...], float | None]
"""One value for a family without labels of its own, a value per label tuple otherwise."""

_UNIT_SUFFIX = {"s": "seconds", "By": "bytes"}


class Kind(Enum):
    """What sort of series a metric is, in Prometheus' terms."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


class Scope(Enum):
    """What a series is of; decides who exports it and which labels it starts with."""

    RUN = ("run",)
    LAYER = ("run", "layer")
    RANK = ("run", "rank")
    AGENT = ("run", "node_rank")


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One exported family, made by `gauge`, `counter`, `info` or `histogram` of its scope.

    name:  OpenTelemetry name: dotted, no unit, never the words total or ratio.
    unit:  UCUM: `s`, `By`, `1` for true ratios in 0..1, `{thing}` for counts and pure numbers.
    read:  from the scope's view to the present value; None exports no series.
    count: for step-exact counters and histograms: from one closed step, as the scope has it, to
           what it adds. A histogram returns the observation, or None.
    label_values: label tuples that exist, at 0, from the agent's start (counters with labels).
    appears_when_counted: of a counter, whether each of its series exists from the first step on of
           which `count` returns it, then at 0 if it adds nothing; it has no `label_values`.
    """

    name: str
    unit: str
    _: KW_ONLY
    kind: Kind
    scope: Scope = Scope.RUN
    help: str
    labels: tuple[str, ...] = ()
    optional_labels: tuple[str, ...] = ()
    """Labels that come last and that some series lack: a reading's label tuple may end before."""
    read: Callable[[Any], Reading] | None = None
    count: Callable[[Any], Reading] | None = None
    label_values: Callable[[Mapping[str, float]], tuple[tuple[str, ...], ...]] | None = None
    """From the thresholds in force to the label tuples known beforehand."""
    appears_when_counted: bool = False
    evidence_step: Callable[[Any], int | None] | None = None
    """Of a counter that later steps have to confirm: from what it is counted from to the trainer's
    step of what it counts."""
    family: str = GRADIENTS.name
    """Of a layer: the family of columns that it is read or counted from."""
    gives_way: bool = False
    """Of a layer: whether it is left out first, for all layers; of the last family first of all."""
    bounds: tuple[float, ...] = ()
    thresholds: tuple[str, ...] = ()
    """Thresholds that the node agent compares against to make it: those are the jobs' to set."""

    def __post_init__(self) -> None:
        if not self.name.startswith("mp_agent.") or {"total", "ratio"} & set(
            self.name.replace(".", "_").split("_")
        ):
            raise CatalogError(
                f"{self.name}: a name starts with mp_agent. and has no total or ratio"
            )
        if self.unit not in {"", "1", *_UNIT_SUFFIX} and not self.unit.startswith("{"):
            raise CatalogError(f"{self.name}: unit {self.unit!r} has no Prometheus suffix")
        if (self.read is None) == (self.count is None):
            raise CatalogError(f"{self.name}: give exactly one of read and count")
        if unknown := set(self.thresholds) - set(DEFAULTS):
            raise CatalogError(f"{self.name}: {', '.join(sorted(unknown))} is no threshold")
        if self.gives_way and (self.scope is not Scope.LAYER or self.read is None):
            raise CatalogError(f"{self.name}: only a gauge of layers gives way")
        if self.appears_when_counted and (self.kind is not Kind.COUNTER or self.label_values):
            raise CatalogError(f"{self.name}: only a counter without label_values appears later")
        if self.kind is Kind.HISTOGRAM and not self.bounds:
            raise CatalogError(f"{self.name}: a histogram needs bounds")

    @property
    def prometheus_name(self) -> str:
        """The exposed name; the OTLP-to-Prometheus translation gives the same."""
        words = [self.name.replace(".", "_")]
        if suffix := _UNIT_SUFFIX.get(self.unit):
            words.append(suffix)
        if self.kind is Kind.COUNTER:
            words.append("total")
        elif self.unit == "1":
            words.append("ratio")
        return "_".join(words)

    @property
    def has_later_series(self) -> bool:
        """Whether there may be series of a counter that are not known beforehand."""
        return self.appears_when_counted or bool(self.optional_labels)

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels of a sample: of the scope, the metric's own, then those that may be empty."""
        return (*self.scope.value, *self.labels, *self.optional_labels)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunMetric(Metric):
    """A metric of the run."""

    scope: Scope = Scope.RUN
    read: Callable[[RunView], Reading] | None = None
    count: Callable[[StepTransition], Reading] | None = None
    evidence_step: Callable[[StepTransition], int | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMetric(Metric):
    """A metric of each layer, or other row of a family's tables."""

    scope: Scope = Scope.LAYER
    read: Callable[[LayerView], Reading] | None = None
    count: Callable[[LayerView], Reading] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMetric(Metric):
    """A metric of each rank of a node; counted from the observed columns of its record."""

    scope: Scope = Scope.RANK
    read: Callable[[RankView], Reading] | None = None
    count: Callable[[Mapping[str, float]], Reading] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentMetric(Metric):
    """A metric of a node agent."""

    scope: Scope = Scope.AGENT
    read: Callable[[AgentView], Reading] | None = None


gauge = partial(RunMetric, kind=Kind.GAUGE)
counter = partial(RunMetric, kind=Kind.COUNTER)
histogram = partial(RunMetric, kind=Kind.HISTOGRAM)
info = partial(RunMetric, unit="", kind=Kind.INFO)
layer_gauge = partial(LayerMetric, kind=Kind.GAUGE)
layer_counter = partial(LayerMetric, kind=Kind.COUNTER)
rank_gauge = partial(RankMetric, kind=Kind.GAUGE)
rank_counter = partial(RankMetric, kind=Kind.COUNTER)
rank_info = partial(RankMetric, unit="", kind=Kind.INFO)
agent_gauge = partial(AgentMetric, kind=Kind.GAUGE)
agent_counter = partial(AgentMetric, kind=Kind.COUNTER)
agent_info = partial(AgentMetric, unit="", kind=Kind.INFO)


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """Cumulative counts per upper bound (the last bound is +Inf), and the sum of what was seen."""

    bounds: tuple[float, ...]
    cumulative_counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: label values in the order of `Metric.label_names`, and its finite value.

    An optional label that the series lacks is empty, which means absent.
    """

    labels: tuple[str, ...]
    value: float | HistogramValue


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its series."""

    metric: Metric
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the agent exports at one moment."""

    families: tuple[Family, ...] = ()
    time_unix_seconds: float = 0.0

    def __iter__(self) -> Iterator[Family]:
        return iter(self.families)
