"""The Alertmanager configuration: receivers, grouping, inhibition and message templates."""

from mp_agent.alerting.alertmanager.configuration import (
    CONFIGURATION_FILE,
    EVERY_CHANNEL,
    MESSAGES,
    MESSAGES_FILE,
    render_alertmanager,
)

__all__ = [
    "CONFIGURATION_FILE",
    "EVERY_CHANNEL",
    "MESSAGES",
    "MESSAGES_FILE",
    "render_alertmanager",
]
