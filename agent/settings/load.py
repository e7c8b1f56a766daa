"""Sources of settings: arguments, variables, a file. A wrong value is reported with its name.

Passes the settings of a process to its helpers, in environment variables.
All but the secrets go as JSON in one variable. Secrets have their own variables, the same as
for people: among the others they would be rows of asterisks. Every value arrives exactly as it
was: infinity, which JSON lacks, is written as Python's `json` reads it, and bytes of a path that
are not UTF-8 as escapes.
"""

import errno
import json
import logging
import os
import reprlib
import stat
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mp_agent.errors import SettingError, unknown_name
from mp_agent.inputs.addresses import shown_address
from mp_agent.settings.fields import ENV_PREFIX, GUARDS, SECRETS, Settings

log = logging.getLogger("mp_agent")

CONFIG_VARIABLE = "MP_AGENT_CONFIG"
HANDOVER_VARIABLE = "MP_AGENT_NODE_SETTINGS"
_OTHER_VARIABLES = (CONFIG_VARIABLE, HANDOVER_VARIABLE, "MP_AGENT_ATTACH")

_FILE_BYTES_MAX = 1 << 20
_UNREADABLE = object()
"""In place of a value: its file cannot be read, as was logged."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 300
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 20


def load_settings(*, refuse: Collection[str] = (), **arguments: Any) -> tuple[Settings, int]:
    """Return the settings in force, and how many environment and file values were ignored.

    Arguments that are None count as not given. Raises SettingError for a wrong argument, naming
    field and value; wrong environment and file values are logged and counted instead, but for the
    settings named in `refuse`. A guard of the port that is ignored leaves the port closed.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if problem := _problem(name, value):
            raise SettingError(f"{name} has value {shown_value(name, value)}: {problem}")
    values: dict[str, Any] = {}
    refused_guards: set[str] = set()
    ignored = 0
    for origin, name, value in (*_file_values(), *_environment_values()):
        if value is _UNREADABLE:
            ignored += 1
        elif (problem := _problem(name, value)) is None:
            values[name] = value
            refused_guards.discard(name)
        elif name in refuse:
            raise SettingError(f"{origin} has value {shown_value(name, value)}: {problem}")
        else:
            ignored += 1
            refused_guards |= {name} & set(GUARDS)
            log.warning(
                "%s has value %s: %s; it is ignored", origin, shown_value(name, value), problem
            )
    for variable, meant in unknown_variables(os.environ).items():
        if meant:
            ignored += 1
            log.warning("%s is no setting and is ignored: did you mean %s?", variable, meant)
    settings = Settings(**{**values, **given})
    return settings.with_refused_guards(refused_guards - given.keys()), ignored


def shown_value(name: str, value: Any) -> str:
    """Return a setting's value as messages may show it."""
    if name in SECRETS:
        return "(hidden)"
    try:
        return _SHORT.repr(shown_address(value) if isinstance(value, str) else value)
    except Exception:
        return f"(a {type(value).__name__} that cannot be shown)"


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with one setting's value, or None."""
    if name not in Settings.model_fields:
        return f"no such setting: {unknown_name(name, Settings.model_fields)}"
    try:
        Settings(**{name: value})
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    except RecursionError:
        return "is nested too deeply"
    except Exception as error:
        return f"cannot be read ({type(error).__name__})"
    return None


def _environment_values() -> Iterator[tuple[str, str, Any]]:
    for name in Settings.model_fields:
        variable = ENV_PREFIX + name.upper()
        value = os.environ.get(variable)
        if value:
            yield variable, name, value


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that look like settings and are none, with the one that was meant.

    It is empty where no name is near. What Kubernetes sets for a Service is left out.
    """
    known = {_variable(name) for name in Settings.model_fields} | {*_OTHER_VARIABLES}
    return {
        variable: _nearest(variable, known)
        for variable in sorted(environ)
        if variable.startswith(ENV_PREFIX) and variable not in known and not _of_service(variable)
    }


def _nearest(variable: str, known: Collection[str]) -> str:
    import difflib  # an unknown variable is rare, and the trainer imports this module

    near = {name.removeprefix(ENV_PREFIX): name for name in known}
    found = difflib.get_close_matches(variable.removeprefix(ENV_PREFIX), near, n=1, cutoff=0.8)
    return near[found[0]] if found else ""


def _of_service(variable: str) -> bool:
    """Return whether Kubernetes sets such a variable for a Service called mp-agent-…."""
    return variable.endswith(("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")) or "_PORT_" in variable


def _file_values() -> Iterator[tuple[str, str, Any]]:
    """Yield the values of `MP_AGENT_CONFIG` (YAML or TOML), else of ./pyproject.toml."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named) if named else Path("pyproject.toml")
    if not named and not _is_file(path):
        return
    try:
        table = _read_table(path)
    except Exception as error:
        why = " ".join(str(error).split())  # the repr of some holds the whole file
        log.warning("settings file %s cannot be read and is ignored: %s", path, why)
        yield str(path), "", _UNREADABLE
        return
    for name, value in table.items():
        yield f"{path}: {name}", str(name), value


def _is_file(path: Path) -> bool:
    """Return whether there is a file; False also where the directory cannot be searched."""
    try:
        return path.is_file()
    except OSError:
        return False


def _read_table(path: Path) -> Mapping[str, Any]:
    """Return the mp_agent table of a TOML or YAML file."""
    text = _read_text(path)
    table: Any
    if path.suffix == ".toml":
        table = tomllib.loads(text)
        for name in ("tool", "mp_agent"):
            table = table.get(name, {}) if isinstance(table, Mapping) else None
    else:
        import yaml  # kept out of the memory of node agents, which read none

        table = yaml.safe_load(text) or {}
    if not isinstance(table, Mapping):
        raise ValueError("must hold a table of settings")
    return table


def _read_text(path: Path) -> str:
    """Return what a regular file holds. Raises OSError, or ValueError for one that is too large.

    Opening never waits, as it would for a pipe.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(_FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise ValueError(f"holds more than {_FILE_BYTES_MAX} bytes")
    return content.decode("utf-8")


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
