"""The conditions that a run has now: which were told of, and how often each began."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mp_agent.alerting.detector.detector import Finding
from mp_agent.alerting.severity import Severity
from mp_agent.records.conditions import ActiveCondition, ConditionMemory, KnownCondition

_Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Condition, severity, and the labels that it keeps."""

_WORST_FIRST = [severity.value for severity in Severity]


class ActiveConditions:
    """A milder severity is told of only once the worse ones are over, as Alertmanager does it."""

    def __init__(self, levels: Iterable[tuple[str, str]], memory: ConditionMemory) -> None:
        """Count on from what an earlier node agent had counted; levels: all that can be found."""
        counts = {(name, severity): count for name, severity, count in memory.fired}
        self.fired = {level: counts.get(level, 0) for level in levels}
        """How often each condition began, by condition and severity."""
        self._known: dict[_Key, KnownCondition] = {}

    @property
    def active(self) -> tuple[ActiveCondition, ...]:
        """The conditions in force, milder severities included, in the order in which they began."""
        return tuple(known.active for known in self._known.values())

    @property
    def memory(self) -> ConditionMemory:
        """What a later node agent needs to go on."""
        return ConditionMemory(
            fired=[(*level, count) for level, count in self.fired.items() if count],
            known=list(self._known.values()),
        )

    def restore(self, finding: Finding, known: KnownCondition) -> None:
        """Go on with a condition that was in force under the node agent before this one."""
        self._known[_key(finding)] = known

    def begin(self, finding: Finding, active: ActiveCondition) -> None:
        """Take in what has begun."""
        self.fired[finding.condition.name, finding.severity] += 1
        self._known[_key(finding)] = KnownCondition(
            active=active, labels=dict(finding.labels), told=False
        )

    def known(self, finding: Finding) -> ActiveCondition | None:
        """Return what is in force of a finding; None where it is not."""
        found = self._known.get(_key(finding))
        return None if found is None else found.active

    def update(self, finding: Finding, active: ActiveCondition) -> None:
        """Replace what a condition in force says of itself."""
        self._known[_key(finding)] = replace(self._known[_key(finding)], active=active)

    def end(self, finding: Finding) -> KnownCondition | None:
        """Forget what is over, and return what was known of it."""
        return self._known.pop(_key(finding), None)

    def pop_unnotified(self) -> Iterator[ActiveCondition]:
        """Yield what is in force and was not told of yet, unless a worse severity of it is."""
        for severity in _WORST_FIRST:
            for key, known in list(self._known.items()):
                if (
                    known.active.severity == severity
                    and not known.told
                    and not self._is_held_back(known)
                ):
                    self._known[key] = replace(known, told=True)
                    yield known.active

    def _is_held_back(self, known: KnownCondition) -> bool:
        worse = _WORST_FIRST[: _WORST_FIRST.index(known.active.severity)]
        return any(
            other.name == known.active.name and other.severity in worse for other in self.active
        )


def _key(finding: Finding) -> _Key:
    return finding.condition.name, finding.severity, tuple(finding.labels.items())
