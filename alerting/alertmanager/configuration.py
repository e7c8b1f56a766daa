"""The whole configuration, put together."""

from math import isfinite
from typing import Any

from mp_agent.alerting.alertmanager.channels import Channel, Site, integrations
from mp_agent.alerting.alertmanager.inhibition import inhibit_rules
from mp_agent.alerting.alertmanager.routes import NOBODY, RECEIVER_NAMES, routing_tree
from mp_agent.alerting.duration_text import prometheus_duration
from mp_agent.alerting.yaml_text import yaml_text
from mp_agent.errors import SettingError

CONFIGURATION_FILE = "alertmanager.yaml"
MESSAGES_FILE = "mp_agent.tmpl"
"""In the directory of the configuration, which names it without a path."""

EVERY_CHANNEL = tuple(Channel)


def render_alertmanager(
    heading: str,
    *,
    channels: tuple[Channel, ...] = (Channel.WEBHOOK,),
    site: Site | None = None,
    webhook_url: str = "",
    time_scale: float = 1.0,
) -> str:
    """Return the configuration; `time_scale` multiplies all waiting times.

    channels: that exist at this site. webhook_url: instead of the site's.
    Where a channel other than the webhook is among them, messages come from MESSAGES_FILE.
    """
    if not channels:
        raise SettingError("channels is empty; alerts would go nowhere")
    if not (isfinite(time_scale) and time_scale > 0):
        raise SettingError(f"time scale has value {time_scale!r}; it must be above 0")
    site = site or Site(webhook_url=webhook_url)
    document: dict[str, Any] = {
        **({"templates": [MESSAGES_FILE]} if channels != (Channel.WEBHOOK,) else {}),
        "route": routing_tree(lambda seconds: prometheus_duration(seconds * time_scale)),
        "inhibit_rules": inhibit_rules(),
        "receivers": [
            {"name": NOBODY},
            *(
                {"name": name, **integrations(severity, channels, site)}
                for severity, name in RECEIVER_NAMES.items()
            ),
        ],
    }
    return yaml_text(document, heading)
