"""Which alerts Alertmanager mutes while others fire.

Two alerts that both lack a label of `equal` count as equal in it, and one that has it differs from
one that lacks it: an alert that is of no run is never muted by one of a run.
"""

from typing import Any

from mp_agent.alerting.condition import COMPONENT
from mp_agent.alerting.conditions.run.run_failed import RUN_FAILED
from mp_agent.alerting.conditions.run.run_stalled import RUN_STALLED
from mp_agent.alerting.conditions.run.run_vanished import RUN_VANISHED
from mp_agent.alerting.expressions.promql import RUN_LABELS
from mp_agent.alerting.first_line.causes import FOLLOWS_FROM
from mp_agent.alerting.severity import Severity

ENDS = tuple(condition.name for condition in (RUN_VANISHED, RUN_STALLED, RUN_FAILED))
"""Alerts that the run itself is over or stands: they explain its milder alerts."""

_MILDER = (
    (Severity.CRITICAL, (Severity.WARNING, Severity.INFO)),
    (Severity.WARNING, (Severity.INFO,)),
)


def inhibit_rules() -> list[dict[str, Any]]:
    """Return the rules.

    A worse severity mutes the milder, an end mutes what it explains, and a cause its effects.
    """
    return [
        *(_mute(source, milder) for source, milder in _MILDER),
        _mute_explained(),
        *(_mute_effect(name, causes) for name, causes in FOLLOWS_FROM.items() if causes),
    ]


def _mute(source: Severity, milder: tuple[Severity, ...]) -> dict[str, Any]:
    """Return: while an alert fires, its milder severities of the same run are muted."""
    return {
        "source_matchers": [f'component="{COMPONENT}"', f'severity="{source.value}"'],
        "target_matchers": [f'component="{COMPONENT}"', _any_of("severity", milder)],
        "equal": ["alertname", *RUN_LABELS],
    }


def _mute_explained() -> dict[str, Any]:
    """Return: a run that ended or stands mutes its other alerts, never the critical ones."""
    ends = "|".join(ENDS)
    return {
        "source_matchers": [f'component="{COMPONENT}"', f'alertname=~"{ends}"'],
        "target_matchers": [
            f'component="{COMPONENT}"',
            _any_of("severity", (Severity.WARNING, Severity.INFO)),
            f'alertname!~"{ends}"',
        ],
        "equal": [*RUN_LABELS],
    }


def _mute_effect(name: str, causes: tuple[str, ...]) -> dict[str, Any]:
    """Return: what can follow from an alert that fires is muted with it, unless it is critical.

    Critical effects stay in the message about their cause.
    """
    severities = (Severity.WARNING, Severity.INFO)
    return {
        "source_matchers": [
            f'component="{COMPONENT}"',
            _any_of("severity", (Severity.CRITICAL, Severity.WARNING)),
            f'alertname=~"{"|".join(causes)}"',
        ],
        "target_matchers": [
            f'component="{COMPONENT}"',
            _any_of("severity", severities),
            f'alertname="{name}"',
        ],
        "equal": [*RUN_LABELS],
    }


def _any_of(label: str, severities: tuple[Severity, ...]) -> str:
    return f'{label}=~"{"|".join(severity.value for severity in severities)}"'
