"""Finds how far thresholds must move until healthy runs bring no more alarms than allowed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log, sqrt
from typing import Any

import yaml

from mp_agent.alerting.backtesting import Knob
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.site import OFF, Assignments
from mp_agent.alerting.values import Severity, Values, values_in_force
from mp_agent.backtest.results import SEVERITIES, RunResult
from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.errors import SettingError
from mp_agent.records.conditions import Alert

KNOBS: Mapping[str, tuple[Knob, ...]] = {c.name: c.knobs for c in CONDITIONS if c.knobs}
"""Knobs of the conditions that can be tuned."""


@dataclass(slots=True)
class Proposal:
    """Changes of what is in force: thresholds, and levels that are to be another severity."""

    thresholds: dict[str, float]
    severities: dict[str, str]
    """`Condition.level` → severity, or `off`."""


def values_with(values: Values, proposal: Proposal) -> Values:
    """Return what is in force with a proposal. Raises SettingError where it contradicts itself."""
    chosen = Assignments()
    for name, severity in proposal.severities.items():
        chosen.set(name, severity)
    changed = {name: value for name, value in values.limits.items() if DEFAULTS[name] != value}
    severities = {
        name: {**values.severities.get(name, {}), **chosen.severities.get(name, {})}
        for name in (*values.severities, *chosen.severities)
    }
    seconds = {name: value / values.time_scale for name, value in values.seconds.items()}
    return values_in_force(
        {**changed, **proposal.thresholds},
        seconds,
        severities=severities,
        selectors=values.selectors,
        time_scale=values.time_scale,
    )


def can_be_had(values: Values, thresholds: Mapping[str, float]) -> bool:
    """Return whether thresholds fit to the others: the severe ones stay beyond the mild ones."""
    try:
        values_with(values, Proposal(dict(thresholds), {}))
    except SettingError:
        return False
    return True


def stricter(values: Values, factor: float, conditions: Iterable[str]) -> dict[str, float]:
    """Return the thresholds of conditions, all moved by a factor to the sensitive side.

    Those that cannot be moved so far without contradicting others stay.
    """
    changes: dict[str, float] = {}
    for condition in conditions:
        for knob in KNOBS.get(condition, ()):
            moved = {**changes, **knob.moved(values.limits, 1 / factor)}
            if can_be_had(values, moved):
                changes = moved
    return changes


_LADDER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
"""Factors by which a threshold is moved, until it is far enough."""
_REFINEMENTS = 4
HEADROOM_FACTORS = (1.25, 1.5, 2.0)

Judge = Callable[
    [Sequence[str], Sequence[Values], frozenset[str] | None], list[Sequence[RunResult]]
]
"""From sources, settings and conditions (None: all) to each run's results by each setting."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alert of a healthy run."""

    run: str
    source: str
    alert: Alert


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdChange:
    """A proposed change, and why.

    limit: the value from which on the alarms stop; None for a severity. margin: by what factor the
    proposed value is beyond it.
    """

    name: str
    before: str
    proposed: str
    limit: float | None
    margin: float | None
    condition: str
    runs: tuple[str, ...]
    """Healthy runs that brought the alarms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was found, and what remains of it under the proposal."""

    healthy: int
    wrong: int
    proposal: Proposal
    changes: tuple[ThresholdChange, ...]
    alarms_before: tuple[Alarm, ...]
    alarms_after: tuple[Alarm, ...]
    found_before: int
    found_after: int
    """Runs labelled wrong with an alert that is severe enough."""
    headroom: Mapping[str, float]
    """Condition → the largest tried factor by which all its thresholds may be moved to the
    sensitive side, from the proposed ones, without an alarm; 1 where the smallest is too much."""


def alarms_of(runs: Iterable[RunResult], severity: str) -> list[Alarm]:
    """Return the alerts of runs that are at least as severe."""
    return [
        Alarm(run.name, run.source, alert)
        for run in runs
        for alert in run.alerts
        if SEVERITIES.index(alert.severity) <= SEVERITIES.index(severity)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search under what is in force, with the smallest severity that counts as an alarm."""

    values: Values
    judge: Judge
    severity: str
    margin: float

    def propose(
        self, alarms: Sequence[Alarm], allowed: int
    ) -> tuple[Proposal, tuple[ThresholdChange, ...]]:
        """Return what to change so that all alarms stop but the `allowed` most stubborn ones."""
        by_condition: dict[str, list[Alarm]] = {}
        for alarm in alarms:
            by_condition.setdefault(alarm.alert.name, []).append(alarm)
        found = {name: self._best(name, own) for name, own in by_condition.items()}
        ranked = sorted(
            ((needed, name, run) for name, (_, factors) in found.items()
             for run, needed in factors.items()),
            key=lambda item: item[0],
        )  # fmt: skip
        kept = ranked[: max(len(ranked) - allowed, 0)]
        proposal, changes = Proposal({}, {}), []
        for name, (knob, _) in found.items():
            own = [(needed, run) for needed, condition, run in kept if condition == name]
            if not own:
                continue
            runs = tuple(run for _, run in own)
            needed = max(needed for needed, _ in own)
            if knob is None or needed == inf:
                changed = self._milder(name, by_condition[name])
            else:
                changed = self._moved(name, knob, needed)
                proposal.thresholds.update(
                    {change.name: float(change.proposed) for change in changed}
                )
            changes += [replace(change, runs=runs) for change in changed]
        for change in changes:
            if change.limit is None:
                proposal.severities[change.name] = change.proposed
        return proposal, tuple(changes)

    def headroom(self, sources: Sequence[str], proposal: Proposal) -> dict[str, float]:
        """Return by what factor each condition's thresholds could be stricter without an alarm."""
        settled = values_with(self.values, proposal)
        conditions = list(KNOBS)
        settings = [
            values_with(settled, Proposal(stricter(settled, factor, conditions), {}))
            for factor in HEADROOM_FACTORS
        ]
        results = self.judge(sources, settings, frozenset(conditions))
        room = dict.fromkeys(conditions, 1.0)
        alarming: set[str] = set()
        for index, factor in enumerate(HEADROOM_FACTORS):
            runs = [run[index] for run in results]
            alarming |= {alarm.alert.name for alarm in alarms_of(runs, self.severity)}
            room.update({name: factor for name in conditions if name not in alarming})
        judged = {
            name
            for name in conditions
            if any(all(spot.name != name for spot in run[0].blind) for run in results)
        }
        return {name: factor for name, factor in room.items() if name in judged}

    def _best(self, name: str, alarms: Sequence[Alarm]) -> tuple[Knob | None, dict[str, float]]:
        """Return the knob that stops most alarms with the smallest move, and the move per run."""
        best: tuple[Knob | None, dict[str, float]] = (
            None,
            {alarm.run: inf for alarm in alarms},
        )
        for knob in KNOBS.get(name, ()):
            factors = self._factors(name, knob, alarms)
            if _cost(factors) < _cost(best[1]):
                best = (knob, factors)
        return best

    def _factors(self, name: str, knob: Knob, alarms: Sequence[Alarm]) -> dict[str, float]:
        """Return for each run by what factor a knob must be moved until its alarm stops."""
        ladder = [
            factor
            for factor in _LADDER
            if can_be_had(self.values, knob.moved(self.values.limits, factor))
        ]
        factors: dict[str, float] = {}
        for alarm in alarms:
            low, high = 1.0, inf
            noisy = self._noisy(name, knob, alarm, ladder)
            for factor, alarms_still in zip(ladder, noisy, strict=True):
                if not alarms_still:
                    high = factor
                    break
                low = factor
            for _ in range(_REFINEMENTS if high < inf else 0):
                middle = sqrt(low * high)
                (still,) = self._noisy(name, knob, alarm, [middle])
                low, high = (middle, high) if still else (low, middle)
            factors[alarm.run] = high
        return factors

    def _noisy(self, name: str, knob: Knob, alarm: Alarm, factors: Sequence[float]) -> list[bool]:
        """Return for each factor whether a run still brings its alarm."""
        if not factors:
            return []
        settings = [
            values_with(self.values, Proposal(knob.moved(self.values.limits, factor), {}))
            for factor in factors
        ]
        results = self.judge([alarm.source], settings, frozenset((name,)))
        own = next(run for run in results if run[0].name == alarm.run or len(results) == 1)
        return [bool(alarms_of([result], self.severity)) for result in own]

    def _moved(self, condition: str, knob: Knob, needed: float) -> list[ThresholdChange]:
        limits, proposed = (
            knob.moved(self.values.limits, factor) for factor in (needed, needed * self.margin)
        )
        if not can_be_had(self.values, proposed):
            proposed = limits
        return [
            ThresholdChange(
                name=name,
                before=f"{self.values.limits[name]:g}",
                proposed=f"{proposed[name]:g}",
                limit=limits[name],
                margin=max(proposed[name], limits[name]) / min(proposed[name], limits[name]),
                condition=condition,
                runs=(),
            )
            for name in knob.names
        ]

    def _milder(self, name: str, alarms: Sequence[Alarm]) -> list[ThresholdChange]:
        """Return that the levels which alarm become information: no threshold stops them."""
        condition = next(one for one in CONDITIONS if one.name == name)
        own = {level.severity for level in condition.levels}
        worst = min((alarm.alert.severity for alarm in alarms), key=SEVERITIES.index)
        first = SEVERITIES.index(worst)
        last = SEVERITIES.index(self.severity)
        changes: list[ThresholdChange] = []
        for severity in [level for level in own if first <= SEVERITIES.index(level.value) <= last]:
            taken = Severity.INFO in own or len(changes) > 0
            changes.append(
                ThresholdChange(
                    name=f"{name}.{severity.value}",
                    before=severity.value,
                    proposed=OFF if taken else Severity.INFO.value,
                    limit=None,
                    margin=None,
                    condition=name,
                    runs=(),
                )
            )
        return changes


def _cost(factors: Mapping[str, float]) -> tuple[int, float]:
    """Return how many alarms a knob cannot stop, and how far it moves for the others."""
    finite = [log(factor) for factor in factors.values() if factor < inf]
    return sum(factor == inf for factor in factors.values()), max(finite, default=inf)


def settings_text(
    proposal: Proposal, heading: Iterable[str], changes: Iterable[ThresholdChange]
) -> str:
    """Return the settings file that node agents, `mp-agent rules` and `backtest` take."""
    table: dict[str, Any] = {}
    if proposal.thresholds:
        table["thresholds"] = dict(proposal.thresholds)
    if proposal.severities:
        table["alerts"] = dict(proposal.severities)
    return _commented(heading, changes) + _yaml(table)


def chart_values_text(
    proposal: Proposal, heading: Iterable[str], changes: Iterable[ThresholdChange]
) -> str:
    """Return the same as values of the chart, which gives them to rules, dashboards and jobs."""
    rules: dict[str, Any] = {}
    if proposal.thresholds:
        rules["thresholds"] = dict(proposal.thresholds)
    for name, severity in proposal.severities.items():
        condition, _, level = name.partition(".")
        rules.setdefault("severities", {}).setdefault(condition, {})[level] = severity
    return _commented(heading, changes) + _yaml({"rules": rules} if rules else {})


def _commented(heading: Iterable[str], changes: Iterable[ThresholdChange]) -> str:
    lines = [*heading, *(_reason(change) for change in changes)]
    return "".join(f"# {line}\n" for line in lines)


def _reason(change: ThresholdChange) -> str:
    runs = ", ".join(change.runs[:3]) + (", …" if len(change.runs) > 3 else "")
    text = f"{change.name}: {change.before} -> {change.proposed}; {change.condition} of {runs}"
    if change.limit is None:
        return f"{text}; no threshold stops it"
    return f"{text}; stops at {change.limit:g}, margin {change.margin:.3g}"


def _yaml(table: dict[str, Any]) -> str:
    # `off` would be read as a boolean unless it is quoted, which the dumper does.
    return yaml.safe_dump(table, sort_keys=False) if table else "{}\n"
