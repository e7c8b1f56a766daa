"""Spans of alerts of a run that is played again."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from mp_agent.alerting.detector.detector import Change, Finding
from mp_agent.alerting.values import Severity, Values
from mp_agent.node.conditions.messages import Observation, described
from mp_agent.records.conditions import ActiveCondition, Alert

Lookup = Callable[[str], Iterable[Mapping[str, str]]]

_WORST_FIRST = tuple(severity.value for severity in Severity)

_Key = tuple[str, tuple[tuple[str, str], ...], str]
"""An episode's condition, labels and severity."""


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

    def conditions(self) -> tuple[ActiveCondition, ...]:
        """Return each condition that was active at any time, at its worst, since it began."""
        return tuple(
            replace(worst.active, since_step=min(one.active.since_step for one in episodes))
            for episodes in self._by_place()
            for worst in (_worst(episodes),)
        )

    def alerts(self) -> tuple[Alert, ...]:
        """Return the alerts in the order in which they were first reported."""
        alerts = map(_alert, self._by_place())
        return tuple(sorted(alerts, key=lambda alert: (alert.fired_point, alert.fired_step)))

    def _by_place(self) -> Iterator[list[_Episode]]:
        """Yield the episodes of each condition and its labels, at all its severities."""

        def place(episode: _Episode) -> tuple[str, tuple[tuple[str, str], ...]]:
            return episode.finding.condition.name, tuple(episode.finding.labels.items())

        for _, episodes in groupby(sorted(self._all, key=place), key=place):
            yield sorted(episodes, key=lambda episode: episode.finding.since_seconds)


def _worst(episodes: Iterable[_Episode]) -> _Episode:
    return min(episodes, key=lambda episode: _WORST_FIRST.index(episode.finding.severity))


def _alert(episodes: list[_Episode]) -> Alert:
    """Return the episodes of a condition, in order, as one alert."""
    worst = _worst(episodes)
    first = min(episodes, key=lambda episode: (episode.fired_point, episode.fired_step))
    spans = _united(episodes)
    condition = worst.finding.condition
    return Alert(
        name=condition.name,
        severity=worst.finding.severity,
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
