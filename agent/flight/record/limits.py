"""The thresholds and durations that a run was judged by, as configured for its node agent."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mp_agent.alerting.site import Assignments, usable_values
from mp_agent.alerting.values import Values, values_in_force
from mp_agent.catalog.thresholds import DEFAULTS, resolve
from mp_agent.errors import SettingError
from mp_agent.settings import Settings


def values_of(settings: Settings) -> Values:
    """Return what a node agent with these settings judges by."""
    return usable_values(settings, time_scale=settings.time_scale)[0]


def recorded_values(thresholds: Mapping[str, float], settings: Mapping[str, Any]) -> Values:
    """Return what a node agent judged by, from its flight record.

    thresholds, settings: the record's; names that this release does not know are ignored.
    """
    known = {name: value for name, value in thresholds.items() if name in DEFAULTS}
    alerts, scale = settings.get("alerts"), settings.get("time_scale")
    recorded = Settings.model_construct(
        thresholds=known,
        alerts=alerts if isinstance(alerts, dict) else {},
        time_scale=scale if isinstance(scale, int | float) else 1.0,
    )
    try:
        return values_of(recorded)
    except SettingError:
        # A later release may relate its thresholds differently; what it judged by still holds.
        return replace(values_in_force(), limits={**DEFAULTS, **known})


def with_assignments(values: Values, texts: Iterable[str]) -> Values:
    """Return values changed by `NAME=VALUE` texts, as `mp-agent rules --set` takes them.

    Raises SettingError, naming the text, for one that is invalid. Severities and selectors are
    accepted without effect.
    """
    chosen = Assignments()
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise SettingError(f"{text!r} sets nothing; write NAME=VALUE")
        chosen.set(name, value)
    return replace(
        values,
        limits=resolve({**values.limits, **chosen.thresholds}),
        seconds={**values.seconds, **chosen.durations},
    )
