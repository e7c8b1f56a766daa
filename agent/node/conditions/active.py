"""Active conditions of a run: which were notified, and how often each began."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mp_agent.alerting.detector.detector import Finding
from mp_agent.alerting.severity import Severity
from mp_agent.records.conditions import ActiveCondition, ConditionMemory, KnownCondition

_Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Condition, severity, and its labels."""

_WORST_FIRST = [severity.value for severity in Severity]


class ActiveConditions:
    """Holds back a milder severity until the worse ones have ended, as Alertmanager does."""

    def __init__(self, levels: Iterable[tuple[str, str]], memory: ConditionMemory) -> None:
        """Continue an earlier node agent's counts; levels: all (condition, severity) that exist."""
        counts = {(name, severity): count for name, severity, count in memory.fired}
        self.fired = {level: counts.get(level, 0) for level in levels}
        """How often each condition began, by condition and severity."""
        self._known: dict[_Key, KnownCondition] = {}

    @property
    def active(self) -> tuple[ActiveCondition, ...]:
        """The active conditions, milder severities included, in the order in which they began."""
        return tuple(known.active for known in self._known.values())

    @property
    def memory(self) -> ConditionMemory:
        """State that a successor of this node agent needs."""
        return ConditionMemory(
            fired=[(*level, count) for level, count in self.fired.items() if count],
            known=list(self._known.values()),
        )

    def restore(self, finding: Finding, known: KnownCondition) -> None:
        """Restore a condition that was active under the previous node agent."""
        self._known[_key(finding)] = known

    def begin(self, finding: Finding, active: ActiveCondition) -> None:
        """Add a condition that has begun."""
        self.fired[finding.condition.name, finding.severity] += 1
        self._known[_key(finding)] = KnownCondition(
            active=active, labels=dict(finding.labels), notified=False
        )

    def known(self, finding: Finding) -> ActiveCondition | None:
        """Return the active condition of a finding; None if it is not active."""
        found = self._known.get(_key(finding))
        return None if found is None else found.active

    def update(self, finding: Finding, active: ActiveCondition) -> None:
        """Replace the text and value of an active condition."""
        self._known[_key(finding)] = replace(self._known[_key(finding)], active=active)

    def end(self, finding: Finding) -> KnownCondition | None:
        """Remove a condition that has ended, and return it."""
        return self._known.pop(_key(finding), None)

    def pop_unnotified(self) -> Iterator[ActiveCondition]:
        """Yield active conditions that were not notified yet, unless a worse severity is active."""
        for severity in _WORST_FIRST:
            for key, known in list(self._known.items()):
                if (
                    known.active.severity == severity
                    and not known.notified
                    and not self._is_held_back(known)
                ):
                    self._known[key] = replace(known, notified=True)
                    yield known.active

    def _is_held_back(self, known: KnownCondition) -> bool:
        worse = _WORST_FIRST[: _WORST_FIRST.index(known.active.severity)]
        return any(
            other.name == known.active.name and other.severity in worse for other in self.active
        )


def _key(finding: Finding) -> _Key:
    return finding.condition.name, finding.severity, tuple(finding.labels.items())
