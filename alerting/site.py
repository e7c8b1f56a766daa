"""What a site has set of the alerts: thresholds, durations, severities and selectors, in one place.

`NAME=VALUE` texts come from `mp-agent rules --set` and, as a table, from the setting `alerts`:

    grad_norm_high=50                     a threshold
    stall_window=20m                      a duration
    MpAgentLossSpike=off                  an alert that is not wanted
    MpAgentLossSpike.severity=info        another severity, where the alert has only one
    MpAgentGradientExplosion.info=off     one level of an alert; or another severity for it
    selectors.series=cluster="a"          label matchers of mp_agent's own series
    selectors.targets=job="mp-agent"      label matchers of the targets that opted in
"""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.durations import BY_NAME as DURATION_BY_NAME
from mp_agent.alerting.durations import parse_seconds
from mp_agent.alerting.values import SELECTORS, Severity, Values, values_in_force
from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.errors import SettingError, unknown_name
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")

OFF = "off"
_BY_ALERT = {condition.name: condition for condition in CONDITIONS}
_SELECTOR = "selectors."


@dataclass(slots=True)
class Assignments:
    """What has been set, by name; later ones win."""

    thresholds: dict[str, float] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    severities: dict[str, dict[Severity, Severity | None]] = field(default_factory=dict)
    selectors: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: str) -> None:
        """Take one in. Raises SettingError, naming it, when there is no such thing to set."""
        if name in DURATION_BY_NAME:
            self.durations[name] = parse_seconds(name, value)
        elif name in DEFAULTS:
            self.thresholds[name] = _number(name, value)
        elif name.startswith(_SELECTOR):
            self.selectors[name.removeprefix(_SELECTOR)] = value
        elif name.partition(".")[0] in _BY_ALERT:
            condition = _BY_ALERT[name.partition(".")[0]]
            changes = self.severities.setdefault(condition.name, {})
            changes.update(_severity_changes(condition, name, value))
        else:
            raise SettingError(unknown_name(name, known_names()))


def known_names() -> tuple[str, ...]:
    """Return all that can be set; of alerts the names alone."""
    return (*DEFAULTS, *DURATION_BY_NAME, *(f"{_SELECTOR}{name}" for name in SELECTORS), *_BY_ALERT)


def site_values(
    settings: Settings | None = None, texts: Iterable[str] = (), *, time_scale: float = 1.0
) -> Values:
    """Return what is in force: the defaults, the settings, then `NAME=VALUE` texts.

    Raises SettingError, naming the culprit, when one of them cannot be had.
    """
    chosen = Assignments()
    if settings is not None:
        chosen.thresholds.update(settings.thresholds)
        for name, value in settings.alerts.items():
            chosen.set(name, value)
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise SettingError(f"{text!r} sets nothing; write NAME=VALUE")
        chosen.set(name, value)
    for alert, changes in chosen.severities.items():
        _check_apart(_BY_ALERT[alert], changes)
    return values_in_force(
        chosen.thresholds,
        chosen.durations,
        severities=chosen.severities,
        selectors=chosen.selectors,
        time_scale=time_scale,
    )


def usable_values(
    settings: Settings, *, time_scale: float = 1.0, logged: bool = True
) -> tuple[Values, int]:
    """Return what is in force in a node agent, and how many overrides were ignored.

    What `site_values` would refuse is left out: a wrong setting must not cost a run its detectors.
    logged: whether it is logged, by its name.
    """
    with suppress(SettingError):
        return site_values(settings, time_scale=time_scale), 0
    usable = settings.model_copy(update={"alerts": {}})
    values, ignored = site_values(usable, time_scale=time_scale), 0
    for name, value in settings.alerts.items():
        candidate = usable.model_copy(update={"alerts": {**usable.alerts, name: value}})
        try:
            values = site_values(candidate, time_scale=time_scale)
        except SettingError as error:
            ignored += 1
            if logged:
                log.warning("alerts: %s; it is ignored", error)
        else:
            usable = candidate
    return values, ignored


def _severity_changes(
    condition: Condition, name: str, value: str
) -> Mapping[Severity, Severity | None]:
    levels = {level.severity.value: level.severity for level in condition.levels}
    level = name.removeprefix(condition.name).removeprefix(".")
    if not level:
        if value != OFF:
            raise SettingError(f"{name} has value {value!r}; only {OFF} is for the whole alert")
        return dict.fromkeys(levels.values())
    if level == "severity" and len(levels) == 1:
        (level,) = levels
    if level not in levels:
        raise SettingError(f"{name} is unknown; {condition.name} has {', '.join(levels)}")
    known = (*(severity.value for severity in Severity), OFF)
    if value not in known:
        raise SettingError(f"{name} has value {value!r}; it must be one of {', '.join(known)}")
    return {levels[level]: None if value == OFF else Severity(value)}


def _check_apart(condition: Condition, changes: Mapping[Severity, Severity | None]) -> None:
    """Refuse two levels of one alert at the same severity: they would be one alert."""
    taken: dict[Severity, Severity] = {}
    for level in condition.levels:
        severity = changes.get(level.severity, level.severity)
        if severity is None:
            continue
        if severity in taken:
            raise SettingError(
                f"{condition.name}.{level.severity.value} has value {severity.value!r}, as has "
                f"{condition.name}.{taken[severity].value}; turn one of them {OFF}"
            )
        taken[severity] = level.severity


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(f"{name} has value {text!r}; it must be a number") from None
