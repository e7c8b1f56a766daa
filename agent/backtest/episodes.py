"""Spans of alerts of a judged log, and its points as curves for a page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite

from mp_agent.alerting.detector.detector import Change, Finding
from mp_agent.alerting.values import Values
from mp_agent.backtest.log.steps import update_skipped
from mp_agent.backtest.log.training_log import Point
from mp_agent.backtest.results import SEVERITIES, Alert, RunCurves
from mp_agent.node.conditions.messages import Observation, described
from mp_agent.records.conditions import ActiveCondition

PLACES_MAX = 1200
"""Points of a curve at most."""
NAMES = ("loss", "grad_norm", "learning_rate", "loss_scale")


def curves_of(points: Sequence[Point]) -> RunCurves:
    """Return the curves of a log's points; of those with equal numbers everywhere, none."""
    kept = _kept(points)
    shown = [points[index] for index in kept]
    values = {}
    for name in NAMES:
        column = [_finite(getattr(point, name)) for point in shown]
        if any(value is not None for value in column):
            values[name] = column
    # Where a point with trouble was thinned out, the next one that is shown bears its mark.
    marks: dict[str, list[int]] = {"loss": [], "grad_norm": [], "skipped": []}
    place = 0
    for index, point in enumerate(points):
        while place < len(kept) - 1 and kept[place] < index:
            place += 1
        for name in ("loss", "grad_norm"):
            value = getattr(point, name)
            if value is not None and not isfinite(value):
                marks[name].append(place)
        if point.skipped_steps or update_skipped(points, index):
            marks["skipped"].append(place)
    return RunCurves(
        step=[point.step for point in shown],
        values=values,
        marks={name: sorted(set(places)) for name, places in marks.items() if places},
    )


def _kept(points: Sequence[Point]) -> list[int]:
    """Return the indices to draw: of each stretch the first, and each curve's extremes."""
    if len(points) <= PLACES_MAX:
        return list(range(len(points)))
    stretches = PLACES_MAX // (1 + 2 * 2)
    size = -(-len(points) // stretches)
    kept = {0, len(points) - 1}
    for begin in range(0, len(points), size):
        indices = range(begin, min(begin + size, len(points)))
        kept.add(begin)
        for name in NAMES[:2]:
            known = [
                (v, i) for i in indices if (v := _finite(getattr(points[i], name))) is not None
            ]
            if known:
                kept.update((min(known)[1], max(known)[1]))
    return sorted(kept)


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


Lookup = Callable[[str], Iterable[Mapping[str, str]]]

_Key = tuple[str, tuple[tuple[str, str], ...], str]
"""Condition, labels, severity."""


@dataclass(slots=True)
class _Episode:
    """A time during which a condition held at a severity."""

    finding: Finding
    active: ActiveCondition
    fired_step: int
    fired_point: int
    last_step: int = 0
    last_seconds: float = 0.0
    ongoing: bool = True


@dataclass(slots=True)
class Episodes:
    """Collects what begins and ends in a run."""

    values: Values
    lookup: Lookup
    _open: dict[_Key, _Episode] = field(default_factory=dict)
    _all: list[_Episode] = field(default_factory=list)

    def note(
        self,
        changes: Iterable[Change],
        observation: Observation,
        *,
        step: int,
        point: int,
    ) -> None:
        """Receive what changed after the run's last `step`; point: index of the last one."""
        changes = list(changes)
        active_now = self._active_with(change.finding for change in changes if change.firing)
        for change in changes:
            finding = change.finding
            key = (finding.condition.name, tuple(finding.labels.items()), finding.severity)
            if change.firing:
                active = described(finding, observation, self.values, self.lookup, active_now)
                episode = _Episode(finding, active, step, point)
                self._open[key] = episode
                self._all.append(episode)
            elif (found := self._open.pop(key, None)) is not None:
                found.last_step, found.last_seconds = step, observation.now_seconds
                found.ongoing = False

    def _active_with(self, findings: Iterable[Finding]) -> dict[str, int]:
        """Return the conditions that hold, those of `findings` included, with their first steps."""
        held = [episode.finding for episode in self._open.values()]
        ordered = sorted((*held, *findings), key=lambda finding: -finding.since_step)
        return {finding.condition.name: finding.since_step for finding in ordered}

    def close(self, step: int, now_seconds: float) -> None:
        """Note the end of the log: what holds then is ongoing."""
        for episode in self._open.values():
            episode.last_step, episode.last_seconds = step, now_seconds

    def alerts(self) -> tuple[Alert, ...]:
        """Return the alerts in the order in which they were first reported."""

        def place(episode: _Episode) -> tuple[str, tuple[tuple[str, str], ...]]:
            return episode.finding.condition.name, tuple(episode.finding.labels.items())

        grouped = groupby(sorted(self._all, key=place), key=place)
        alerts = [_alert(list(episodes)) for _, episodes in grouped]
        return tuple(sorted(alerts, key=lambda alert: (alert.fired_point, alert.fired_step)))


def _alert(episodes: list[_Episode]) -> Alert:
    """Return the episodes of a condition, at all its severities, as one alert."""
    episodes.sort(key=lambda episode: episode.finding.since_seconds)
    severity = min((e.finding.severity for e in episodes), key=SEVERITIES.index)
    worst = next(episode for episode in episodes if episode.finding.severity == severity)
    first = min(episodes, key=lambda episode: (episode.fired_point, episode.fired_step))
    spans = _united(episodes)
    condition = worst.finding.condition
    return Alert(
        name=condition.name,
        severity=severity,
        labels=dict(worst.finding.labels),
        first_step=episodes[0].finding.since_step,
        fired_step=first.fired_step,
        last_step=max(episodes, key=lambda episode: episode.last_seconds).last_step,
        fired_point=first.fired_point,
        duration_seconds=sum(span.end_seconds - span.begin_seconds for span in spans),
        times=len(spans),
        ongoing=any(episode.ongoing for episode in episodes),
        value=worst.finding.value,
        value_step=worst.fired_step,
        summary=worst.active.summary,
        description=worst.active.description,
        spans=tuple((span.first_step, span.last_step) for span in spans),
    )


@dataclass(slots=True)
class _Span:
    begin_seconds: float
    end_seconds: float
    first_step: int
    last_step: int


def _united(episodes: Iterable[_Episode]) -> list[_Span]:
    """Return the times of episodes, in order, those that overlap as one."""
    spans: list[_Span] = []
    for episode in episodes:
        begin, end = episode.finding.since_seconds, episode.last_seconds
        if spans and begin <= spans[-1].end_seconds:
            if end > spans[-1].end_seconds:
                spans[-1].end_seconds, spans[-1].last_step = end, episode.last_step
        else:
            spans.append(_Span(begin, end, episode.finding.since_step, episode.last_step))
    return spans
