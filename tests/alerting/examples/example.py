"""Example series of a condition: what it must fire on, and what it must not.

An example is a healthy run, a sample per minute, with some of its series replaced. From each one
unit tests of the rules are made; it may fire nothing at all beyond what it says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mp_agent.alerting.expressions import Limit
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metric import Metric
from mp_agent.errors import CatalogError

Value = float | None | Literal["stale"]
"""A sample; None: no scrape saw the series; "stale": it ended here."""

TARGET = {"namespace": "ml", "job": "train", "instance": "node-0:9464"}
"""Labels that the scraper of an example puts on each series."""

RUN = "demo"


@dataclass(frozen=True, slots=True)
class Track:
    """One series: a sample per minute from minute 0 on; the last one goes on to the end.

    metric: a catalog metric, or the name of a series that the scraper itself makes.
    labels: in addition to those of TARGET and the run; a threshold stands for its label text.
    """

    metric: Metric | str
    values: tuple[Value, ...]
    labels: Mapping[str, str | Limit] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The series' metric name."""
        return self.metric if isinstance(self.metric, str) else self.metric.prometheus_name

    @property
    def is_seconds(self) -> bool:
        """Whether the values are durations, which a time scale shortens with everything else."""
        return isinstance(self.metric, Metric) and self.metric.unit == "s"

    def over(self, minutes: int) -> tuple[Value, ...]:
        """Return the samples of minutes 0 to `minutes`."""
        last = self.values[-1]
        going_on: Value = None if last == "stale" else last
        missing = minutes + 1 - len(self.values)
        return (*self.values, *(going_on,) * missing)[: minutes + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A run's series, and the alerts that they mean.

    minutes: how long the example lasts.
    tracks: replace the healthy run's series of the same name and labels, or add to them.
    without: metrics that this run does not have.
    age_minutes: how long the node agent has been counting at minute 0.
    ends: minute at which all series of the healthy run end.
    fires: the condition's own severities that fire, each with its description as it comes out.
    labels: that the alerts have besides severity, component and those of the run; an empty one is
    not there.
    at: minute at which exactly `fires` are firing; `not_yet`: minutes at which none of them is.
    also: severities of other conditions that this example fires, by name.
    """

    title: str
    minutes: int
    tracks: tuple[Track, ...] = ()
    without: tuple[Metric, ...] = ()
    age_minutes: float = 600
    ends: int | None = None
    fires: Mapping[Severity, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    at: int = 0
    not_yet: tuple[int, ...] = ()
    also: Mapping[str, tuple[Severity, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for track in self.tracks:
            if len(track.values) > self.minutes + 1 or not track.values:
                raise CatalogError(
                    f"{self.title}: {track.name} has {len(track.values)} samples, "
                    f"the example {self.minutes + 1}"
                )


def flat(value: Value, samples: int) -> tuple[Value, ...]:
    """Return the same value `samples` times."""
    return (value,) * samples


def ramp(start: float, step: float, samples: int) -> tuple[float, ...]:
    """Return `samples` values from `start` on, each `step` above the one before."""
    return tuple(start + step * index for index in range(samples))


def halving(start: float, samples: int) -> tuple[float, ...]:
    """Return `samples` values from `start` on, each half the one before."""
    return tuple(start * 0.5**index for index in range(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """The examples of one condition: every level has one that fires it."""

    firing: tuple[Example, ...]
    quiet: tuple[Example, ...]

    @property
    def all(self) -> tuple[Example, ...]:
        """Those that fire, then those that do not."""
        return (*self.firing, *self.quiet)
