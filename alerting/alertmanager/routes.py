"""Where alerts go: by component first, then by severity, one message per run."""

from collections.abc import Callable
from typing import Any

from mp_agent.alerting.condition import COMPONENT
from mp_agent.alerting.severity import Severity

NOBODY = "nobody"
"""Receiver of what is not ours; a site that has a default receiver of its own puts it here."""

RECEIVER_NAMES = {
    Severity.CRITICAL: "on-call",
    Severity.WARNING: "tickets",
    Severity.INFO: "hints",
}

Wait = Callable[[float], str]
"""Seconds to Alertmanager's notation."""

_MINUTE, _HOUR = 60.0, 3600.0


def routing_tree(wait: Wait) -> dict[str, Any]:
    """Return the routes.

    Warnings wait half a minute for others of their run, critical alerts ten seconds, hints five
    minutes: of a collapse that brings several alerts, people get one message.
    """
    return {
        "receiver": NOBODY,
        "routes": [
            {
                "matchers": [f'component="{COMPONENT}"'],
                "receiver": RECEIVER_NAMES[Severity.WARNING],
                "group_by": ["cluster", "namespace", "run"],
                "group_wait": wait(30),
                "group_interval": wait(5 * _MINUTE),
                "repeat_interval": wait(4 * _HOUR),
                "routes": [
                    _of(Severity.CRITICAL, group_wait=wait(10), group_interval=wait(_MINUTE)),
                    _of(
                        Severity.INFO,
                        group_wait=wait(5 * _MINUTE),
                        repeat_interval=wait(24 * _HOUR),
                    ),
                ],
            }
        ],
    }


def _of(severity: Severity, **waits: str) -> dict[str, Any]:
    return {
        "matchers": [f'severity="{severity.value}"'],
        "receiver": RECEIVER_NAMES[severity],
        **waits,
    }
