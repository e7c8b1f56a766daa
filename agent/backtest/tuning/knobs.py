"""Proposed changes of what is in force, and whether they fit to the rest of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mp_agent.alerting.backtesting import Knob
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.site import Assignments
from mp_agent.alerting.values import Values, values_in_force
from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.errors import SettingError

KNOBS: Mapping[str, tuple[Knob, ...]] = {c.name: c.knobs for c in CONDITIONS if c.knobs}
"""Of the conditions that can be tuned."""


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
