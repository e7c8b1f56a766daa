"""Passes the settings of a process to its helpers, in environment variables.

All but the secrets go as JSON in one variable. Secrets have variables of their own, the same as
for people: among the others they would be rows of asterisks. Every value arrives exactly as it
was: infinity, which JSON lacks, is written as Python's `json` reads it, and bytes of a path that
are not UTF-8 as escapes.
"""

import json
import os

from mp_agent.errors import SettingError
from mp_agent.settings.fields import ENV_PREFIX, SECRETS, Settings
from mp_agent.settings.load import load_settings

HANDOVER_VARIABLE = "MP_AGENT_NODE_SETTINGS"
_REFUSED_GUARDS = "refused_guards"


def handed_over(settings: Settings) -> dict[str, str]:
    """Return the variables with which another process has these settings."""
    values = settings.model_dump(exclude=set(SECRETS))
    values[_REFUSED_GUARDS] = settings.refused_guards
    variables = {HANDOVER_VARIABLE: json.dumps(values, default=os.fspath)}
    for name in SECRETS:
        variables[_variable(name)] = getattr(settings, name).get_secret_value()
    return variables


def receive_settings() -> tuple[Settings, int]:
    """Return the settings that were handed over; where there are none, those of the environment.

    The second value counts what was ignored; what the other process ignored, it counts itself.
    Raises SettingError when what was handed over cannot be read: the environment alone may lack
    the TLS and the password that were asked for.
    """
    text = os.environ.get(HANDOVER_VARIABLE)
    if text is None:
        return load_settings()
    try:
        values = json.loads(text)
        secrets = {name: value for name in SECRETS if (value := os.environ.get(_variable(name)))}
        refused_guards = values.pop(_REFUSED_GUARDS, ())
        settings = Settings(**{**values, **secrets})
        return settings.with_refused_guards(map(str, refused_guards)), 0
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(f"{HANDOVER_VARIABLE} cannot be read: {error}") from error


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()
