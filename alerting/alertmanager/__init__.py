"""The Alertmanager configuration: receivers, grouping, inhibition and message templates."""

from mp_agent.alerting.alertmanager.configuration import (
    CONFIGURATION_FILE,
    MESSAGES,
    MESSAGES_FILE,
    USUAL_CHANNELS,
    render_alertmanager,
)

__all__ = [
    "CONFIGURATION_FILE",
    "MESSAGES",
    "MESSAGES_FILE",
    "USUAL_CHANNELS",
    "render_alertmanager",
]
