"""What a training log holds of a run: its points, whatever the format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.detector.readings import Reading
from mp_agent.node.cluster.root import MergedTable
from mp_agent.records.merged import MergedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One logged point. None: not logged. Loss and norm may be NaN or infinite.

    step: the trainer's own number. time_seconds: on any clock, such as Unix time. skipped: whether
    the update was skipped. skipped_steps: how many of the steps since the point before were.
    """

    step: int
    time_seconds: float | None = None
    step_seconds: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None
    skipped_steps: int = 0


@dataclass(frozen=True, slots=True)
class Scrape:
    """What Prometheus had of a run at one time: series, without the label `run`, and values."""

    time_seconds: float
    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """One run as its log has it.

    merged: the steps and layers as the node agent merged them, where the source is a flight record.
    scrapes: its series, where the source is a Prometheus that scraped it. Points are there in any
    case.
    """

    name: str
    source: str
    """Path or address."""
    format: str
    points: tuple[Point, ...]
    step_seconds: float | None = None
    """Time per step, where the log says so of the run as a whole."""
    clip_max_norm: float | None = None
    notes: tuple[str, ...] = ()
    """What was left out or assumed."""
    merged: tuple[MergedStep | MergedTable, ...] = ()
    scrapes: tuple[Scrape, ...] = ()
    quantities: frozenset[Quantity] = frozenset()
    """What it holds besides that of its points."""

    @property
    def held(self) -> frozenset[Quantity]:
        """What the log holds."""
        points = self.points
        found = set(self.quantities)
        for quantity, there in _OF_POINTS.items():
            if any(getattr(point, there) is not None for point in points):
                found.add(quantity)
        if any(point.skipped_steps for point in points):
            found.add(Quantity.SKIPS)
        if {Quantity.LOSS_SCALE, Quantity.GRAD_NORM} <= found:
            # A norm that is not finite was skipped by the scaler.
            found.add(Quantity.SKIPS)
        return frozenset(found)


_OF_POINTS: Mapping[Quantity, str] = {
    Quantity.LOSS: "loss",
    Quantity.GRAD_NORM: "grad_norm",
    Quantity.LEARNING_RATE: "learning_rate",
    Quantity.LOSS_SCALE: "loss_scale",
    Quantity.SKIPS: "skipped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How logs are read. columns: quantity → name of its column, where the user gave one.

    run, start, end, scrape_seconds and every_series are of a Prometheus; every_series: all metrics
    of mp_agent, not only those that are judged or drawn.
    """

    format: str = ""
    run: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    start_unix_seconds: float | None = None
    end_unix_seconds: float | None = None
    scrape_seconds: float = 15.0
    every_series: bool = False
