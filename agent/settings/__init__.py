"""All settings: argument > `MP_AGENT_*` variable > file > default.

A wrong argument raises; a wrong environment or file value is logged, counted and left at its
default, because a Kubernetes Service called mp-agent puts `MP_AGENT_PORT=tcp://…` into every pod.
"""

from mp_agent.settings.fields import ENV_PREFIX, SECRETS, Settings, default_directory
from mp_agent.settings.load import (
    CONFIG_VARIABLE,
    load_settings,
    shown_value,
    unknown_variables,
)

__all__ = [
    "CONFIG_VARIABLE",
    "ENV_PREFIX",
    "SECRETS",
    "Settings",
    "default_directory",
    "load_settings",
    "shown_value",
    "unknown_variables",
]
