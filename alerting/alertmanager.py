"""A minimal Alertmanager configuration: route by component and severity, mute the milder."""

from typing import Any

from mp_agent.alerting.condition import COMPONENT
from mp_agent.alerting.durations import prometheus_duration
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.yaml_text import yaml_text

WEBHOOK_URL = "http://127.0.0.1:9095/alerts"
"""A placeholder: where alerts are sent to is each site's own."""

_RUN = ["cluster", "namespace", "job", "run"]


def render_alertmanager(
    heading: str, *, webhook_url: str = WEBHOOK_URL, time_scale: float = 1.0
) -> str:
    """Return the configuration; `time_scale` multiplies all waiting times."""

    def wait(seconds: float) -> str:
        return prometheus_duration(seconds * time_scale)

    document: dict[str, Any] = {
        "route": {
            "receiver": "nobody",
            "routes": [
                {
                    "matchers": [f'component="{COMPONENT}"'],
                    "receiver": "tickets",
                    "group_by": ["cluster", "run"],
                    "group_wait": wait(30),
                    "group_interval": wait(300),
                    "repeat_interval": wait(4 * 3600),
                    "routes": [
                        {
                            "matchers": [f'severity="{Severity.CRITICAL.value}"'],
                            "receiver": "on-call",
                            "group_wait": wait(10),
                            "group_interval": wait(60),
                        }
                    ],
                }
            ],
        },
        "inhibit_rules": [_mute(source, milder) for source, milder in _MILDER],
        "receivers": [
            {"name": "nobody"},
            *({"name": name, "webhook_configs": [{"url": webhook_url}]} for name in _RECEIVERS),
        ],
    }
    return yaml_text(document, heading)


_RECEIVERS = ("tickets", "on-call")
_MILDER = (
    (Severity.CRITICAL, (Severity.WARNING, Severity.INFO)),
    (Severity.WARNING, (Severity.INFO,)),
)


def _mute(source: Severity, milder: tuple[Severity, ...]) -> dict[str, Any]:
    """Return: while an alert fires, its milder severities of the same run are muted."""
    severities = "|".join(severity.value for severity in milder)
    return {
        "source_matchers": [f'component="{COMPONENT}"', f'severity="{source.value}"'],
        "target_matchers": [f'component="{COMPONENT}"', f'severity=~"{severities}"'],
        "equal": ["alertname", *_RUN],
    }
