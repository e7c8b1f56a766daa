"""What exporters read: families of samples, immutable, replaced as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass

from mp_agent.catalog.metric import Metric


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
