"""How a process hands its settings to one that works for it: in variables.

All but the secrets go as JSON in one variable. Secrets have variables of their own, the same as
for people: among the others they would be rows of asterisks.
"""

import json
import logging
import os

from mp_agent.settings.fields import ENV_PREFIX, SECRETS, Settings
from mp_agent.settings.load import load_settings

log = logging.getLogger("mp_agent")

HANDOVER_VARIABLE = "MP_AGENT_NODE_SETTINGS"


def handed_over(settings: Settings) -> dict[str, str]:
    """Return the variables with which another process has these settings."""
    variables = {HANDOVER_VARIABLE: settings.model_dump_json(exclude=set(SECRETS))}
    for name in SECRETS:
        variables[_variable(name)] = getattr(settings, name).get_secret_value()
    return variables


def take_over() -> tuple[Settings, int]:
    """Return the settings that were handed over, else those of the environment.

    The second value counts what was ignored; what the other process ignored, it counts itself.
    """
    text = os.environ.get(HANDOVER_VARIABLE)
    if text is None:
        return load_settings()
    try:
        secrets = {name: value for name in SECRETS if (value := os.environ.get(_variable(name)))}
        return Settings(**{**json.loads(text), **secrets}), 0
    except (ValueError, TypeError) as error:
        log.warning("%s is ignored: %s", HANDOVER_VARIABLE, error)
        settings, ignored = load_settings()
        return settings, ignored + 1


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()
