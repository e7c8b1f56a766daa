"""Where settings come from: arguments, variables, a file. A wrong one is told by name and value."""

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mp_agent.errors import SettingError
from mp_agent.settings.fields import ENV_PREFIX, SECRETS, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger("mp_agent")

CONFIG_VARIABLE = "MP_AGENT_CONFIG"


def load_settings(*, refuse: Collection[str] = (), **arguments: Any) -> tuple[Settings, int]:
    """Return the settings in force, and how many environment and file values were ignored.

    Arguments that are None count as not given. Raises SettingError for a wrong argument, naming
    field and value; wrong environment and file values are logged and counted instead, but for the
    settings named in `refuse`.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if problem := _problem(name, value):
            raise SettingError(f"{name} has value {_shown(name, value)}: {problem}")
    values: dict[str, Any] = {}
    ignored = 0
    for origin, name, value in (*_file_values(), *_environment_values()):
        problem = _problem(name, value)
        if problem is None:
            values[name] = value
        elif name in refuse:
            raise SettingError(f"{origin} has value {_shown(name, value)}: {problem}")
        else:
            ignored += 1
            log.warning("%s has value %s: %s; it is ignored", origin, _shown(name, value), problem)
    return Settings(**{**values, **given}), ignored


def _shown(name: str, value: Any) -> str:
    """Return a setting's value as messages may show it."""
    return "(hidden)" if name in SECRETS else repr(value)


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with one setting's value, or None."""
    if name not in Settings.model_fields:
        return f"no such setting; known: {', '.join(Settings.model_fields)}"
    try:
        Settings(**{name: value})
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    return None


def _environment_values() -> Iterator[tuple[str, str, Any]]:
    for name in Settings.model_fields:
        variable = ENV_PREFIX + name.upper()
        value = os.environ.get(variable)
        if value:
            yield variable, name, value


def _file_values() -> Iterator[tuple[str, str, Any]]:
    """Yield the values of `MP_AGENT_CONFIG` (YAML or TOML), else of ./pyproject.toml."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named) if named else Path("pyproject.toml")
    if not named and not path.is_file():
        return
    try:
        table = _read_table(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        log.warning("settings file %s cannot be read and is ignored: %s", path, error)
        yield str(path), "settings file", "unreadable"
        return
    for name, value in table.items():
        yield f"{path}: {name}", name, value


def _read_table(path: Path) -> Mapping[str, Any]:
    """Return the mp_agent table of a TOML or YAML file."""
    if path.suffix == ".toml":
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("mp_agent", {})
    else:
        table = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(table, Mapping):
        raise ValueError("must hold a table of settings")
    return table
